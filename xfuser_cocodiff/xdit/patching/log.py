"""Messages to the user, logged by rank 0: INFO for normal events, WARNING for those that the user should act on."""

import logging
import os

import torch.distributed as dist

from xfuser_cocodiff.xdit.settings.variables import LOG_LEVEL_VARIABLE, LOG_LEVELS

_logger = logging.getLogger("xfuser_cocodiff")
_logged: set[str] = set()
"""Messages of the current session."""


class _StderrHandler(logging.StreamHandler):
    """Handler that writes to stderr until the program configures logging, which gives the root logger a handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


_handler: _StderrHandler | None = None
_previous_level: int | None = None
"""Level of the logger before this module changed it; None while it is unchanged."""


def info_once(message: str) -> None:
    """Log a message about a normal event, once per session."""
    _log_once(logging.INFO, message)


def info_always(message: str) -> None:
    """Log a message about a normal event, at every call."""
    _log(logging.INFO, message)


def warn_once(message: str) -> None:
    """Log a message that the user should act on, once per session."""
    _log_once(logging.WARNING, message)


def warn_always(message: str) -> None:
    """Log a message that the user should act on, at every call."""
    _log(logging.WARNING, message)


def begin_session() -> None:
    """Let each message be logged once more: a new session begins."""
    _logged.clear()


def close() -> None:
    """Restore the logger."""
    global _handler, _previous_level
    if _handler:
        _logger.removeHandler(_handler)
        _handler = None
    if _previous_level is not None:
        _logger.setLevel(_previous_level)
        _previous_level = None
    _logged.clear()


def rank() -> int:
    """Return the rank of this process: torch.distributed's, or the launcher's until that is initialized."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK") or 0)


def _log_once(level: int, message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        _log(level, message)


def _log(level: int, message: str) -> None:
    if rank() == 0:
        _configure()
        _logger.log(level, "cocodiff: %s", message)


def _configure() -> None:
    """Set the level that COCODIFF_LOG_LEVEL names, and write to stderr if the program has not configured logging.

    A value that is not valid counts as not given here: `check_variables` raises an error about it.
    """
    global _handler, _previous_level
    text = os.environ.get(LOG_LEVEL_VARIABLE, "").lower()
    requested = getattr(logging, text.upper()) if text in LOG_LEVELS else None
    is_unconfigured = _logger.level == logging.NOTSET and not _logger.hasHandlers()
    if _previous_level is not None or (requested is None and not is_unconfigured):
        return
    _previous_level = _logger.level
    if not _logger.hasHandlers():
        _handler = _StderrHandler()
        _logger.addHandler(_handler)
    _logger.setLevel(requested or logging.INFO)
