"""Versions, device, topology and patches on this machine, for `cocodiff env`."""

import os
import platform as machine
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from xfuser_cocodiff import install
from xfuser_cocodiff.engine.autotune import tuning_cache
from xfuser_cocodiff.engine.topology import launcher
from xfuser_cocodiff.lab.reporting.device_facts import device_facts, package_version
from xfuser_cocodiff.xdit.integration import activation
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platforms import detected_topology, platform
from xfuser_cocodiff.xdit.settings.parsers import OFF
from xfuser_cocodiff.xdit.settings.resolve import cache_folder

_REQUIRED = ("xfuser-cocodiff", "xfuser", "torch", "diffusers", "transformers")
_OPTIONAL = ("flash-attn", "intel-extension-for-pytorch", "oneccl-bindings-for-pytorch")


@dataclass(frozen=True)
class PatchState:
    """State of one patch."""

    site: str
    """Full name of the symbol."""
    why: str
    """Reason for the patch."""
    state: str
    """'applied', 'ready' (applied when its module is imported or the plugin activated), 'not needed', 'used' (required
    and not replaced), or why it does not fit."""


@dataclass(frozen=True)
class Environment:
    """Versions, device, topology, patches and tuning cache of a machine."""

    versions: Mapping[str, str | None]
    """Installed version of each relevant package; None if it is absent."""
    device: dict[str, str]
    """Device, driver, kernels, collectives and links, or what of them is missing."""
    ranks_per_node: int | None
    """Ranks per node, as the launcher reports them; None without one."""
    degree: int
    """Ulysses degree for which the topology is detected."""
    topology: str
    """Detected topology of a Ulysses group of `degree` ranks."""
    plugin: str
    """'installed', or why the plugin is not installed."""
    patches: list[PatchState]
    """State of every patch."""
    cache: str
    """Folder of the tuning cache; 'off' if it is disabled."""
    kept: list[str]
    """Entries of the tuning cache, one line per machine."""


def describe(degree: int | None = None) -> Environment:
    """Return the environment of this machine.

    Args:
        degree: Ulysses degree to detect the topology for. Default: the number of ranks that the launcher started, or 1.
    """
    local, device = launcher.ranks_per_node(os.environ), platform.compute_device()
    degree = degree or int(os.environ.get("WORLD_SIZE", 0)) or local or 1
    installed, folder = install(), cache_folder(os.environ)
    return Environment(
        versions={
            "python": machine.python_version(),
            **{name: package_version(name) for name in (*_REQUIRED, *_OPTIONAL)},
        },
        device=device_facts(device, _backend(device)),
        ranks_per_node=local,
        degree=degree,
        topology=str(detected_topology.detect_topology(degree, os.environ)),
        plugin="installed" if installed else _reason(),
        patches=patch_states(),
        cache=str(folder or OFF),
        kept=_cache_entries(folder) if folder else [],
    )


def patch_states() -> list[PatchState]:
    """Return the state of every patch in this process."""
    patch_set = activation.patch_set()

    def state(patch: Patch) -> str:
        if not patch.is_needed:
            return "not needed"
        if patch_set.is_applied(patch):
            return "applied"
        return patch.problem() or ("ready" if patch.replace else "used")

    return [PatchState(patch.name, patch.why, state(patch)) for patch in patch_set.patches]


def _reason() -> str:
    """Return why the plugin is not installed."""
    return activation.incompatibility() or "removed because of an error"


def _cache_entries(folder: Path) -> list[str]:
    """Return a line for each machine in the tuning cache."""
    lines = []
    for file in sorted(folder.glob("*.json")):
        if known := tuning_cache.load(file):
            ranks = known.machine.get("ranks", [])
            hosts = ", ".join(dict.fromkeys(str(rank.get("host")) for rank in ranks))
            links = "links, " if known.profile else ""
            lines.append(
                f"{file.name}: {len(ranks)} ranks as {known.machine.get('topology')} on {hosts}, torch "
                f"{known.machine.get('torch')}: {links}schedules of {len(known.schedules)} "
                "layer signatures"
            )
    return lines


def facts(environment: Environment) -> dict[str, str]:
    """Return what `cocodiff env` prints, by name."""
    local, cache = environment.ranks_per_node, "; ".join([environment.cache, *environment.kept])
    detected = f"for Ulysses degree {environment.degree}, {'no launcher' if local is None else f'{local} ranks a node'}"
    return {
        **{name: found or "missing" for name, found in environment.versions.items() if found or name in _REQUIRED},
        "plugin": environment.plugin,
        "topology": f"{environment.topology} ({detected})",
        "tuning cache": cache if environment.kept else f"{cache}: empty",
        **environment.device,
    }


def _backend(device: torch.device) -> str:
    """Return the backend of torch.distributed for a device, or why there is none."""
    added = platform.detect()
    try:
        return added.backend() if added else torch.distributed.get_default_backend_for_device(device)
    except RuntimeError as error:
        return f"none: {error}"
