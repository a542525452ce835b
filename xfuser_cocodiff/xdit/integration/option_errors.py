"""Errors of options end a command with one line, by the first rank, and with status 2."""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from types import TracebackType

from xfuser_cocodiff.engine.settings.config import check_variables, resolve
from xfuser_cocodiff.engine.settings.ring_placement import SequenceRanks
from xfuser_cocodiff.engine.topology import launcher
from xfuser_cocodiff.xdit.integration.agreement import OptionError
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platforms import platform

STATUS = 2

_hook: Callable | None = None
"""What showed errors before."""


def patches() -> list[Patch]:
    """Return the row of the xdit command."""
    return [Patch("xfuser.cli", "main", "options are checked before ranks start", _checking, ("args",))]


def install() -> None:
    """Show errors of options as one line from here on."""
    global _hook
    if _hook is None:
        _hook, sys.excepthook = sys.excepthook, _show


def uninstall() -> None:
    """Leave errors to what showed them before."""
    global _hook
    if _hook is not None and sys.excepthook is _show:
        sys.excepthook = _hook
    _hook = None


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, OptionError):
        (_hook or sys.__excepthook__)(kind, error, trace)
        return
    if os.environ.get("RANK", "0") == "0":
        # Past what torch.distributed gathers of a hook's output, and shows only where the hook returns.
        print(f"cocodiff: {error}", file=sys.__stderr__)
    raise SystemExit(STATUS)  # which Python takes for the status of the process


def _checking(original: Callable) -> Callable:
    @functools.wraps(original)
    def main(args: Sequence[str] | None = None) -> None:
        try:
            check(sys.argv[1:] if args is None else args)
        except ValueError as error:
            print(f"cocodiff: {error}", file=sys.stderr)
            sys.exit(STATUS)
        original(args)

    return main


def check(arguments: Sequence[str]) -> None:
    """Check the options of an xdit command as its ranks will.

    Raises:
        ValueError: names the option, its value and what is valid.
    """
    from xfuser.cli import extract_torchrun_args, get_nproc_from_args
    from xfuser.config import FlexibleArgumentParser, xFuserArgs

    launch, rest = extract_torchrun_args(list(arguments))
    values = vars(xFuserArgs.add_runner_args(FlexibleArgumentParser()).parse_args(rest))
    local = str(launch["--nproc_per_node"] or get_nproc_from_args(rest))
    if not local.isdecimal():
        return  # torchrun counts devices ("gpu", "auto"), and ranks will check
    here = {**os.environ, "LOCAL_WORLD_SIZE": local}
    ulysses, ring = values["ulysses_degree"] or 1, values["ring_degree"] or 1
    detected, whole = (launcher.detect(size, here, platform.device_name()) for size in (ulysses, ulysses * ring))
    check_variables(here)
    resolve(values, here, SequenceRanks(ulysses, detected, ring, whole), platform.compute_device().type)
