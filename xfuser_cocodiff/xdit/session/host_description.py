"""What is found of a machine is found of this: its ranks, and all that figures depend on beside them."""

import importlib.metadata
import json
import os
import platform
from typing import Any

import torch

from xfuser_cocodiff.engine.topology import devices as devices
from xfuser_cocodiff.engine.topology.launcher import CLUSTER_VARIABLE
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.platforms.platform import compute_device

RING = {"part": "ring"}
"""Of findings that are of rings."""


def described(topology: Topology, kernels: str, backend: str) -> dict[str, Any]:
    """What findings are of, beside the ranks: the same on all of them.

    Args:
        topology: of the ranks along whose axes something is found.
        kernels: the settings'.
        backend: of their group, as PyTorch names it.
    """
    emulated = json.loads(os.environ.get(CLUSTER_VARIABLE, "{}"))
    return {
        "topology": str(topology),
        "degree": topology.size,
        "backend": backend,
        "kernels": kernels,
        "links": {name: value for name, value in emulated.items() if name not in ("addresses", "interface")},
        **{name: _version(name) for name in ("xfuser-cocodiff", "torch", "xfuser", "diffusers")},
    }


def this_rank() -> dict[str, Any]:
    """What a rank says of itself."""
    device = compute_device()
    name = torch.get_device_module(device).get_device_name() if device != devices.CPU else platform.machine()
    return {"host": platform.node(), "device": f"{device.type} {name}", "threads": torch.get_num_threads()}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # it runs from a source tree
        return None
