"""Versions, platform, topology and patches on this machine, for `cocodiff env`."""

import importlib.metadata
import os
import platform as machine
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from xfuser_cocodiff.engine.autotune import tuning_cache
from xfuser_cocodiff.engine.settings import config
from xfuser_cocodiff.engine.settings.options import OFF
from xfuser_cocodiff.engine.topology import launcher
from xfuser_cocodiff.xdit.integration import activation
from xfuser_cocodiff.xdit.patching.patch import PatchSet
from xfuser_cocodiff.xdit.platforms import detected_topology, platform

_PACKAGES = (
    "xfuser-cocodiff",
    "xfuser",
    "torch",
    "diffusers",
    "transformers",
    "yunchang",
    "triton",
    "flash-attn",
    "intel-extension-for-pytorch",
    "oneccl-bindings-for-pytorch",
)


@dataclass(frozen=True)
class Environment:
    """Versions, platform, topology, patches and tuning cache of a machine."""

    versions: Mapping[str, str | None]
    """Installed version of each relevant package; None if it is absent."""
    device_type: str
    """Type of the device, as PyTorch names it."""
    platform: str
    """Whether xDiT supports the device itself, or the plugin adds it."""
    backend: str
    """Backend of torch.distributed for the device, or why there is none."""
    ranks_per_node: int | None
    """Ranks per node, as the launcher reports them; None without one."""
    degree: int
    """Ulysses degree for which the topology is detected."""
    topology: str
    """Detected topology of a Ulysses group of `degree` ranks."""
    plugin: str
    """'installed', or why the plugin is not installed."""
    patches: list[activation.PatchState]
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
    local = launcher.ranks_per_node(os.environ)
    degree = degree or int(os.environ.get("WORLD_SIZE", 0)) or local or 1
    added, accelerator = platform.detect(), torch.accelerator.current_accelerator(check_available=True)
    installed, folder = activation.install(), config.cache_folder(os.environ)
    return Environment(
        versions={"python": machine.python_version(), **{name: _version(name) for name in _PACKAGES}},
        device_type=accelerator.type if accelerator else "cpu",
        platform="added by the plugin" if added and not platform.has_native_support() else "xDiT's own",
        backend=_backend(added, accelerator),
        ranks_per_node=local,
        degree=degree,
        topology=str(detected_topology.detect_topology(degree, os.environ)),
        plugin="installed"
        if installed
        else activation.incompatibility(PatchSet(activation.patch_table(), activation.PACKAGE)),
        patches=activation.patch_states(),
        cache=str(folder or OFF),
        kept=_cache_entries(folder) if folder else [],
    )


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


def facts(environment: Environment) -> list[tuple[str, str]]:
    """Return the names and values that `cocodiff env` prints above the patches."""
    local = environment.ranks_per_node
    return [
        *((name, version or "-") for name, version in environment.versions.items()),
        ("device", f"{environment.device_type} ({environment.platform})"),
        ("collectives", environment.backend),
        ("ranks per node", "unknown: no launcher" if local is None else str(local)),
        ("topology", f"{environment.topology} (detected, for Ulysses degree {environment.degree})"),
        ("plugin", environment.plugin),
        (
            "tuning cache",
            "; ".join([environment.cache, *environment.kept]) if environment.kept else f"{environment.cache}: empty",
        ),
    ]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backend(added: platform.Platform | None, accelerator: torch.device | None) -> str:
    try:
        return added.backend() if added else torch.distributed.get_default_backend_for_device(accelerator)
    except RuntimeError as error:
        return f"none: {error}"
