"""Errors in options: they end a command with one line, printed by rank 0, and exit status 2."""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from types import TracebackType

from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platforms import detected_topology, platform
from xfuser_cocodiff.xdit.settings.resolve import is_enabled, resolve
from xfuser_cocodiff.xdit.settings.ring_placement import SequenceRanks
from xfuser_cocodiff.xdit.settings.variables import check_variables

EXIT_STATUS = 2

_previous_hook: Callable | None = None
"""Hook that printed errors before."""


def patches() -> list[Patch]:
    """Return the patch of the xdit command."""
    return [Patch("xfuser.cli", "main", "options are checked before ranks start", _with_check, ("args",))]


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


def _with_check(original: Callable) -> Callable:
    @functools.wraps(original)
    def main(args: Sequence[str] | None = None) -> None:
        try:
            check(sys.argv[1:] if args is None else args)
        except ValueError as error:
            print(f"cocodiff: {error}", file=sys.stderr)
            sys.exit(EXIT_STATUS)
        original(args)

    return main


def check(arguments: Sequence[str]) -> None:
    """Check the options of an xdit command before it starts ranks.

    Raises:
        ValueError: an option is not valid; names it, its value and the valid set.
    """
    from xfuser.cli import extract_torchrun_args, get_nproc_from_args
    from xfuser.config import FlexibleArgumentParser, xFuserArgs

    launcher_arguments, rest = extract_torchrun_args(list(arguments))
    values = vars(xFuserArgs.add_runner_args(FlexibleArgumentParser()).parse_args(rest))
    ranks_per_node = str(launcher_arguments["--nproc_per_node"] or get_nproc_from_args(rest))
    if not ranks_per_node.isdecimal():
        return  # torchrun counts devices ("gpu", "auto"), and ranks check later
    environment = {**os.environ, "LOCAL_WORLD_SIZE": ranks_per_node}
    check_variables(environment)
    if not is_enabled(values, environment):
        return
    ulysses, ring = values["ulysses_degree"] or 1, values["ring_degree"] or 1
    detected, full = (detected_topology.detect_topology(size, environment) for size in (ulysses, ulysses * ring))
    resolve(values, environment, SequenceRanks(ulysses, detected, ring, full), platform.compute_device().type)
