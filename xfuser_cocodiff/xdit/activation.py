"""Puts the patch table in place and takes it away again."""

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet

from xfuser_cocodiff import autoload
from xfuser_cocodiff.options import RECORD_VARIABLE
from xfuser_cocodiff.xdit import (
    engine,
    flags,
    lost,
    platform,
    recorder,
    ring,
    ring_attention,
    run_clock,
    sites,
    start,
    used,
    usp,
)
from xfuser_cocodiff.xdit.log import note
from xfuser_cocodiff.xdit.patch import Patch, PatchSet

PACKAGE = "xfuser"
SUPPORTED = SpecifierSet(">=0.7.0,<0.8", prereleases=True)
"""Versions of xfuser whose sites the table fits."""

_installed: PatchSet | None = None


def install() -> bool:
    """Patch xDiT now, or as soon as it is imported; see :func:`xfuser_cocodiff.install`."""
    global _installed
    autoload.unwatch()
    if _installed is None or _installed.withdrawn:
        patch_set = PatchSet(table(), PACKAGE)
        if reason := obstacle(patch_set):
            note(f"xDiT stays as it is: {reason}")
            return False
        patch_set.install()
        _installed = patch_set
    return not _installed.withdrawn


def uninstall() -> None:
    """Restore every site, or have none patched when xDiT is imported later."""
    global _installed
    autoload.unwatch()
    if _installed is not None:
        if _installed.applied:
            engine.active().close()
        _installed.uninstall()
        _installed = None


def table() -> list[Patch]:
    """Every row for this machine."""
    here, record = platform.detect(), os.environ.get(RECORD_VARIABLE)
    recorders = [recorder.Recorder(Path(record), rank=int(os.environ.get("RANK", "0")))] if record else []
    return [
        *(platform.patches(here) if here else []),
        *(ring_attention.patches() if here and here.device_type in ring_attention.DEVICES else []),
        *flags.patches(),
        *ring.patches(),
        *start.patches(),
        *sites.patches(),
        *usp.patches(),
        *lost.patches(),
        *used.patches(),
        *run_clock.patches([usp.Steps(), *recorders]),
        *(row for each in recorders for row in recorder.patches(each)),
    ]


def obstacle(patch_set: PatchSet) -> str | None:
    """Why a patch set cannot be installed here; None when it can."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "xfuser is not installed"
    version = xdit_version()
    if version is not None and version not in SUPPORTED:
        return f"xfuser {version} is not supported, only {SUPPORTED}"
    problems = patch_set.problems()
    return f"it is not the xfuser that this plugin knows ({'; '.join(problems)})" if problems else None


def xdit_version() -> str | None:
    """Version of the installed xfuser; None where it is absent or runs from a source tree."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class RowState:
    """One row of the table, for `cocodiff env`."""

    site: str
    why: str
    state: str
    """'applied', 'ready' (applied when its module is imported), 'not needed', 'used' (as it is) or what is wrong with
    it."""


def states() -> list[RowState]:
    """The state of every row in this process."""
    patch_set = _installed or PatchSet(table(), PACKAGE)

    def state(row: Patch) -> str:
        if not row.needed:
            return "not needed"
        if patch_set.is_applied(row):
            return "applied"
        return row.problem() or ("ready" if row.replace else "used")

    return [RowState(row.name, row.why, state(row)) for row in patch_set.rows]
