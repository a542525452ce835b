"""What the plugin says to the user, on one rank."""

import functools
import logging
import os

_logger = logging.getLogger("xfuser_cocodiff")


def tell(message: str) -> None:
    """Warn; other ranks than the first stay silent."""
    if os.environ.get("RANK", "0") == "0":
        _logger.warning("cocodiff: %s", message)


@functools.cache
def note(message: str) -> None:
    """The same, once in the life of the process."""
    tell(message)
