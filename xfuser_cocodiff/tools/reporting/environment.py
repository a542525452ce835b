"""Versions, device, kernels, topology and patches on this machine, for `cocodiff env`."""

import os
import time
from typing import Any

import torch

from xfuser_cocodiff import install
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.compression import codec_check
from xfuser_cocodiff.engine.compression.default_mode import MULTI_NODE_MODE
from xfuser_cocodiff.engine.topology import launcher
from xfuser_cocodiff.xdit.integration import activation
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platforms import platform
from xfuser_cocodiff.xdit.platforms.package_version import package_version
from xfuser_cocodiff.xdit.settings.parsers import OFF
from xfuser_cocodiff.xdit.settings.resolve import cache_folder

REQUIRED = ("xfuser", "torch", "diffusers", "transformers")
_OPTIONAL = ("triton", "flash-attn", "oneccl")


def describe(degree: int | None = None) -> dict[str, Any]:
    """Return the environment of this machine, as in a record.

    Args:
        degree: Ulysses degree to detect the topology for. Default: the number of ranks that the launcher started, or 1.
    """
    local, device = launcher.ranks_per_node(os.environ), platform.compute_device()
    degree = degree or int(os.environ.get("WORLD_SIZE", 0)) or local or 1
    folder = cache_folder(os.environ)
    is_installed = install()
    return {
        "versions": {name: package_version(name) for name in (*REQUIRED, *_OPTIONAL)},
        "plugin": "installed" if is_installed else activation.incompatibility() or "removed because of an error",
        "topology": str(platform.detect_topology(degree)),
        "degree": degree,
        "ranks_per_node": local,
        "cache": str(folder or OFF),
        "kept": sorted(file.name for file in folder.glob("*.json")) if folder else [],
        "device": {"device": _device(device), "kernels": _kernels(device), "collectives": _collectives(device)},
        "patches": patch_states(),
    }


def patch_states() -> list[dict[str, str]]:
    """Return symbol, reason and state of every patch in this process.

    The state is 'applied', 'ready' (applied when its module is imported or the plugin activated), 'not needed', 'used'
    (required and not replaced), or why it does not fit.
    """
    patch_set = activation.patch_set()

    def state(patch: Patch) -> str:
        if not patch.is_needed:
            return "not needed"
        if patch_set.is_applied(patch):
            return "applied"
        return patch.problem() or ("ready" if patch.replace else "used")

    return [{"symbol": patch.name, "why": patch.why, "state": state(patch)} for patch in patch_set.patches]


def _device(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu: PyTorch {torch.__version__} finds no GPU"
    module = torch.get_device_module(device)
    return f"{device.type}: {module.device_count()} x {module.get_device_name(0)}"


def _kernels(device: torch.device) -> str:
    """Encode and decode values on a device and return with which kernels, and whether that worked."""
    name, began = kernels.backend_for(device), time.monotonic()
    if problem := codec_check.failure(name, MULTI_NODE_MODE, None, device):
        return f"{name}: {problem}; runs use PyTorch's kernels, which are slower"
    return f"{name}: encode and decode ran within {time.monotonic() - began:.1f} s, compilation included"


def _collectives(device: torch.device) -> str:
    """Return the backend of torch.distributed for a device, or why there is none."""
    added = platform.detect()
    try:
        name = added.backend() if added else torch.distributed.get_default_backend_for_device(device)
    except RuntimeError as error:
        return f"none: {error}"
    return f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}" if name == "nccl" else name
