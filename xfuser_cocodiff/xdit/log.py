"""What the plugin says to the user: each thing once, on one rank."""

import functools
import logging
import os

_logger = logging.getLogger("xfuser_cocodiff")


@functools.cache
def note(message: str) -> None:
    """Warn once in the life of the process; other ranks than the first stay silent."""
    if os.environ.get("RANK", "0") == "0":
        _logger.warning("cocodiff: %s", message)
