"""Puts the patch table in place and takes it away again."""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packaging.specifiers import SpecifierSet
from torch import nn

from xfuser_cocodiff import autoload
from xfuser_cocodiff.xdit.attention import long_context, output_gather, patch_points, ring_attention, usp, zero_padding
from xfuser_cocodiff.xdit.integration import flags, option_errors, ray_workers, required_internals
from xfuser_cocodiff.xdit.patching import log
from xfuser_cocodiff.xdit.patching.log import warn_once
from xfuser_cocodiff.xdit.patching.patch import Patch, PatchSet
from xfuser_cocodiff.xdit.platforms import platform
from xfuser_cocodiff.xdit.run_tracking import run_tracker
from xfuser_cocodiff.xdit.session import collective_failures, ring_groups, session, startup

PACKAGE = "xfuser"
SUPPORTED = SpecifierSet(">=0.7.0,<0.8", prereleases=True)
"""Versions of xfuser whose sites the table fits."""

_installed: PatchSet | None = None
_tracker: run_tracker.RunTracker | None = None
"""Of what is installed."""


def install(listeners: Sequence[run_tracker.Listener] = (), rows: Sequence[Patch] = ()) -> bool:
    """Patch xDiT now, or as soon as it is imported; see :func:`xfuser_cocodiff.install`.

    Args:
        listeners: who wants to know of runs and steps, stock's too.
        rows: what they patch besides.
    """
    global _installed, _tracker
    autoload.unwatch()
    if _installed is None or _installed.withdrawn:
        tracker = run_tracker.RunTracker(listeners)
        patch_set = PatchSet([*patch_table(tracker), *rows], PACKAGE, is_active=bool(listeners))
        if reason := incompatibility(patch_set):
            warn_once(f"the plugin is not installed, and xDiT runs unchanged: {reason}")
            return False
        patch_set.install()
        option_errors.install()
        _installed, _tracker = patch_set, tracker
    return not _installed.withdrawn


def uninstall() -> None:
    """Restore every site, or have none patched when xDiT is imported later."""
    global _installed, _tracker
    autoload.unwatch()
    if _installed is not None:
        if PACKAGE in sys.modules:
            session.active().close()
            session.leave()
        _tracker.close()
        option_errors.uninstall()
        log.close()
        _installed.uninstall()
        _installed = _tracker = None


def activate(pipeline: Any = None) -> None:
    """Apply the patches that act in steps, since the plugin is asked for. Until then steps run stock xDiT's functions.

    Args:
        pipeline: the one to run; it may have been built before.

    Raises:
        RuntimeError: they cannot be applied.
    """
    if _installed is not None:
        _installed.activate(_modules_and_processors(pipeline))


def _modules_and_processors(pipeline: Any) -> Iterator[Any]:
    """Modules of a pipeline and their processors, some of which keep USP as an attribute (Wan, LTX-2, Ideogram 4)."""
    for part in vars(pipeline).values() if pipeline is not None else ():
        for module in part.modules() if isinstance(part, nn.Module) else ():
            yield from (each for each in (module, getattr(module, "processor", None)) if hasattr(each, "__dict__"))


def run(steps: int | None) -> run_tracker.Sampling:
    """A run of a sampler without diffusers; see :func:`xfuser_cocodiff.run`."""
    in_use = _installed is not None and not _installed.withdrawn and PACKAGE in sys.modules
    return run_tracker.Sampling(_tracker if in_use else None, steps)


def patch_table(tracker: run_tracker.RunTracker | None = None) -> list[Patch]:
    """Every row for this machine."""
    here, tracker = platform.detect(), tracker or run_tracker.RunTracker()
    acting = [
        *patch_points.patches(),
        *output_gather.patches(),
        *usp.patches(),
        *zero_padding.patches(),
        *long_context.patches(),
        *collective_failures.patches(),
        *tracker.patches(),
    ]
    return [
        *(platform.patches(here) if here else []),
        *(ring_attention.patches() if here and here.device_type in ring_attention.DEVICES else []),
        *flags.patches(activate),
        *option_errors.patches(),
        *ray_workers.patches(),
        *ring_groups.patches(),
        *startup.patches(activate),
        *required_internals.patches(),
        *(replace(row, on_activation=True) for row in acting),
    ]


def incompatibility(patch_set: PatchSet) -> str | None:
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
class PatchState:
    """One row of the table, for `cocodiff env`."""

    site: str
    why: str
    state: str
    """'applied', 'ready' (applied when its module is imported, or the plugin asked for), 'not needed', 'used' (as it
    is) or what is wrong with it."""


def patch_states() -> list[PatchState]:
    """The state of every row in this process."""
    patch_set = _installed or PatchSet(patch_table(), PACKAGE)

    def state(row: Patch) -> str:
        if not row.needed:
            return "not needed"
        if patch_set.is_applied(row):
            return "applied"
        return row.problem() or ("ready" if row.replace or row.import_context else "used")

    return [PatchState(row.name, row.why, state(row)) for row in patch_set.rows]
