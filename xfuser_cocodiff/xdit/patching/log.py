"""Messages to the user, by the first rank: INFO for what is normal, WARNING for what the user should act on."""

import logging
import os

_logger = logging.getLogger("xfuser_cocodiff")
_said: set[str] = set()
"""Messages since the last session began."""


class _Handler(logging.StreamHandler):
    """Prints to stderr while nobody has configured logging: then the root logger has a handler of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


_handler: _Handler | None = None


def info_once(message: str) -> None:
    """Say what is normal, once per session."""
    _say_once(logging.INFO, message)


def warn_once(message: str) -> None:
    """Say what the user should act on, once per session."""
    _say_once(logging.WARNING, message)


def warn_always(message: str) -> None:
    """Say what the user should act on, however often it was said."""
    _say(logging.WARNING, message)


def begin_session() -> None:
    """Forget what was said: another session begins, of which it may be true as well."""
    _said.clear()


def close() -> None:
    """Leave the logger as it was."""
    global _handler
    if _handler:
        _logger.removeHandler(_handler)
        _logger.setLevel(logging.NOTSET)
        _handler = None
    _said.clear()


def _say_once(level: int, message: str) -> None:
    if message not in _said:
        _said.add(message)
        _say(level, message)


def _say(level: int, message: str) -> None:
    global _handler
    if os.environ.get("RANK", "0") != "0":
        return
    if _handler is None and _logger.level == logging.NOTSET and not _logger.hasHandlers():
        _handler = _Handler()
        _logger.addHandler(_handler)
        _logger.setLevel(logging.INFO)
    _logger.log(level, "cocodiff: %s", message)
