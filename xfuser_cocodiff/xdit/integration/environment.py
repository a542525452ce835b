"""What the plugin finds on this machine, for `cocodiff env`."""

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
from xfuser_cocodiff.xdit.platforms import platform

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
    """Versions, platform, topology and the state of the patch table."""

    versions: Mapping[str, str | None]
    """Installed version of each package that matters; None where it is absent."""
    device_type: str
    platform: str
    """Whose work it is that xDiT runs on this device."""
    backend: str
    """Backend of torch.distributed, or why there is none."""
    ranks_per_node: int | None
    """As the launcher says; None without one."""
    degree: int
    topology: str
    """Topology that a Ulysses group of `degree` ranks gets when none is given."""
    plugin: str
    """'installed', or why it is not."""
    patches: list[activation.PatchState]
    cache: str
    """Folder that keeps what is found of machines; 'off' where nothing is kept."""
    kept: list[str]
    """What it keeps, a line for each machine."""


def describe(degree: int | None = None) -> Environment:
    """Look at this machine.

    Args:
        degree: Ulysses degree to detect the topology for; the ranks that the launcher started when not given, else 1.
    """
    local = launcher.ranks_per_node(os.environ)
    degree = degree or int(os.environ.get("WORLD_SIZE", 0)) or local or 1
    added, accelerator = platform.detect(), torch.accelerator.current_accelerator(check_available=True)
    installed, folder = activation.install(), config.cache_folder(os.environ)
    return Environment(
        versions={"python": machine.python_version(), **{name: _version(name) for name in _PACKAGES}},
        device_type=accelerator.type if accelerator else "cpu",
        platform="added by the plugin" if added and not platform.is_xdits_own() else "xDiT's own",
        backend=_backend(added, accelerator),
        ranks_per_node=local,
        degree=degree,
        topology=str(launcher.detect(degree, os.environ, platform.device_name())),
        plugin="installed"
        if installed
        else activation.incompatibility(PatchSet(activation.patch_table(), activation.PACKAGE)),
        patches=activation.patch_states(),
        cache=str(folder or OFF),
        kept=_kept(folder) if folder else [],
    )


def _kept(folder: Path) -> list[str]:
    """A line for each machine of which something was found."""
    lines = []
    for file in sorted(folder.glob("*.json")):
        if known := tuning_cache.load(file):
            ranks = known.machine.get("ranks", [])
            hosts = ", ".join(dict.fromkeys(str(rank.get("host")) for rank in ranks))
            links = "links, " if known.profile else ""
            lines.append(
                f"{file.name}: {len(ranks)} ranks as {known.machine.get('topology')} on {hosts}, torch "
                f"{known.machine.get('torch')}: {links}schedules of {len(known.schedules)} "
                "kinds of layers"
            )
    return lines


def facts(found: Environment) -> list[tuple[str, str]]:
    """Names and values to show above the patch table."""
    local = found.ranks_per_node
    return [
        *((name, version or "-") for name, version in found.versions.items()),
        ("device", f"{found.device_type} ({found.platform})"),
        ("collectives", found.backend),
        ("ranks per node", "unknown: no launcher says" if local is None else str(local)),
        ("topology", f"{found.topology} (detected, for Ulysses degree {found.degree})"),
        ("plugin", found.plugin),
        ("kept for later runs", "; ".join([found.cache, *found.kept]) if found.kept else f"{found.cache}: nothing yet"),
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
