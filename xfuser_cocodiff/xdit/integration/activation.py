"""Installation and activation of all patches of xDiT.

Installed patches add the options to xDiT. The others are applied when the plugin is activated, by a config that enables
it: until then the denoising steps run stock xDiT's functions.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from packaging.specifiers import SpecifierSet
from torch import nn

from xfuser_cocodiff import autoload
from xfuser_cocodiff.xdit.attention import (
    all_to_all,
    indivisible_heads,
    long_context,
    usp,
)
from xfuser_cocodiff.xdit.integration import agreement, config_fields
from xfuser_cocodiff.xdit.patching import host, log
from xfuser_cocodiff.xdit.patching.log import warn_once
from xfuser_cocodiff.xdit.patching.patch import Patch, PatchSet
from xfuser_cocodiff.xdit.platforms import platform
from xfuser_cocodiff.xdit.platforms.package_version import package_version
from xfuser_cocodiff.xdit.run_tracking import run_tracker
from xfuser_cocodiff.xdit.session import ring_groups, session, startup
from xfuser_cocodiff.xdit.settings.options import ENABLE_OPTION
from xfuser_cocodiff.xdit.settings.resolve import is_enabled

PACKAGE = "xfuser"
SUPPORTED = SpecifierSet(">=0.7.0,<0.8", prereleases=True)
"""Versions of xfuser that the patches fit."""

_NO_CONFIG = (
    "the plugin is not active: this program makes process groups without a config that enables it; call "
    "`engine_config, _ = xFuserArgs(model='', ulysses_degree=...).create_config()` and "
    "`initialize_runtime_state(pipeline, engine_config)` before the first step"
)
_installed: PatchSet | None = None
_tracker: run_tracker.RunTracker | None = None
"""Tracker of the installed patches."""


def install(listeners: Sequence[run_tracker.RunListener] = (), patches: Sequence[Patch] = ()) -> bool:
    """Patch xDiT now, or as soon as it is imported; see :func:`xfuser_cocodiff.install`.

    Args:
        listeners: listeners to runs and steps, also to those of stock xDiT.
        patches: patches of the listeners.
    """
    global _installed, _tracker
    autoload.unwatch()
    if _installed is None or _installed.is_removed:
        tracker = run_tracker.RunTracker(listeners)
        if reason := incompatibility():
            warn_once(f"the plugin is not installed, and xDiT runs unchanged: {reason}")
            return False
        _installed, _tracker = PatchSet([*patch_table(tracker), *patches], PACKAGE), tracker
        _installed.install()
    return not _installed.is_removed


def uninstall() -> None:
    """Restore every patched symbol, and apply no patches if xDiT is imported later."""
    global _installed, _tracker
    autoload.unwatch()
    if _installed is not None:
        if PACKAGE in sys.modules:
            session.active().close()
            session.deactivate()
        _tracker.close()
        log.close()
        _installed.uninstall()
        _installed = _tracker = None


def activate(pipeline: Any = None) -> None:
    """Apply the patches that act in denoising steps.

    Args:
        pipeline: pipeline to run, which may have been built before.

    Raises:
        RuntimeError: they cannot be applied.
    """
    if _installed is not None:
        _installed.activate(_modules_and_processors(pipeline))
        for feature, reason in _installed.off.items():
            warn_once(f"{feature} is off: {reason}; install a tested version of {reason.partition('.')[0]}")


def _activate_for_config() -> list[str]:
    """Activate the plugin, and return the features that are off, which must be the same on all ranks."""
    activate()
    return [*_installed.off] if _installed else []


def _modules_and_processors(pipeline: Any) -> Iterator[Any]:
    """Yield the modules of a pipeline and their processors, some of which hold USP as an attribute (Wan, LTX-2)."""
    for part in vars(pipeline).values() if pipeline is not None else ():
        for module in part.modules() if isinstance(part, nn.Module) else ():
            yield from (each for each in (module, getattr(module, "processor", None)) if hasattr(each, "__dict__"))


def run(steps: int | None) -> run_tracker.Sampling:
    """Return a run of a sampler that uses no diffusers pipeline; see :func:`xfuser_cocodiff.run`."""
    is_in_use = _installed is not None and not _installed.is_removed and PACKAGE in sys.modules
    return run_tracker.Sampling(_tracker if is_in_use else None, steps)


def patch_table(tracker: run_tracker.RunTracker | None = None) -> list[Patch]:
    """Return all patches for this machine."""
    machine, tracker = platform.detect(), tracker or run_tracker.RunTracker()
    in_steps = [
        *(replace(patch, in_layers=True) for patch in (*all_to_all.patches(), *usp.patches())),
        *_of_feature("padding of heads that are not divisible", indivisible_heads.patches()),
        *_of_feature("support of long-context attention (StepVideo, Sana)", long_context.patches()),
        *host.REQUIRED,
    ]
    runs = _of_feature("runs of diffusers' pipelines, and with them lossy modes", tracker.patches())
    return [
        *(platform.patches(machine) if machine else []),
        *config_fields.patches(_activate_for_config),
        *_of_feature("the hint that no config enables the plugin", [_GROUPS_PATCH]),
        *_of_feature("--cocodiff_ring inner", ring_groups.patches()),
        *startup.patches(activate, agreement.check_all),
        *(replace(patch, on_activation=True) for patch in in_steps),
        *(replace(patch, on_activation=not tracker.listeners) for patch in runs),
    ]


def _with_hint(original: Callable) -> Callable:
    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        # xDiT's own runtime state calls it with a config, which has activated the plugin.
        if _installed is not None and not _installed.is_active and is_enabled(_given_flag(), os.environ):
            warn_once(_NO_CONFIG)
        original(*args, **kwargs)

    return initialize_model_parallel


_GROUPS_PATCH = Patch(
    "xfuser.core.distributed.parallel_state",
    "initialize_model_parallel",
    "programs with attention of xDiT and no config of it are told how to activate the plugin",
    _with_hint,
)


def _given_flag() -> dict[str, bool]:
    """Return whether the command line has the flag, which a program without xDiT's parser ignores."""
    return {ENABLE_OPTION: any(argument.replace("-", "_") == f"__{ENABLE_OPTION}" for argument in sys.argv)}


def _of_feature(feature: str, patches: Sequence[Patch]) -> list[Patch]:
    """Return patches that are left out together if one of them does not fit the installed xDiT."""
    return [replace(patch, feature=feature) for patch in patches]


def incompatibility() -> str | None:
    """Return why patches cannot be installed; None if they can, by the version of xfuser."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "xfuser is not installed"
    version = xdit_version()
    if version is not None and version not in SUPPORTED:
        return f"xfuser {version} is not supported; install xfuser {SUPPORTED}"
    return None


def xdit_version() -> str | None:
    """Return the version of the installed xfuser; None if it is absent or runs from a source tree."""
    return package_version(PACKAGE)


def patch_set() -> PatchSet:
    """Return the installed patches; those that would be installed where there are none."""
    return _installed or PatchSet(patch_table(), PACKAGE)
