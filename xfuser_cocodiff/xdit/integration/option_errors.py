"""Errors in options: they end a command with one line, printed by rank 0, and exit status 2."""

import os
import sys
from collections.abc import Callable
from types import TracebackType

EXIT_STATUS = 2

_previous_hook: Callable | None = None
"""Hook that printed errors before."""


class OptionError(ValueError):
    """Error in options that every rank raises."""


def install() -> None:
    """Print errors in options as one line from now on. Called where one is raised, so that others are Python's."""
    global _previous_hook
    if _previous_hook is None:
        _previous_hook, sys.excepthook = sys.excepthook, _print_error


def uninstall() -> None:
    """Restore the previous hook for errors."""
    global _previous_hook
    if _previous_hook is not None and sys.excepthook is _print_error:
        sys.excepthook = _previous_hook
    _previous_hook = None


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, OptionError):
        (_previous_hook or sys.__excepthook__)(kind, error, trace)
        return
    if os.environ.get("RANK", "0") == "0":
        # Not to sys.stderr: torch.distributed buffers the output of a hook, and prints it only if the hook returns.
        print(f"cocodiff: {error}", file=sys.__stderr__)
    raise SystemExit(EXIT_STATUS)  # which Python uses as exit status
