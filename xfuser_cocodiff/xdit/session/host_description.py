"""Descriptions of the hosts and the software that tuning results depend on, by which the tuning cache finds them."""

import json
import os
import platform
from typing import Any

import torch

from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.engine.topology.launcher import CLUSTER_VARIABLE
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.platforms.package_version import package_version
from xfuser_cocodiff.xdit.platforms.platform import compute_device
from xfuser_cocodiff.xdit.settings.variables import collectives_are_synchronous


def describe(topology: Topology, kernels: str, backend: str) -> dict[str, Any]:
    """Return the part of the description that is the same on all ranks.

    Args:
        topology: of the group that is tuned.
        kernels: value of --cocodiff_kernels.
        backend: PyTorch's name for the backend of the group.
    """
    emulated = json.loads(os.environ.get(CLUSTER_VARIABLE, "{}"))
    return {
        "topology": str(topology),
        "degree": topology.size,
        "backend": backend,
        "kernels": kernels,
        "synchronous": collectives_are_synchronous(os.environ),
        "links": {name: value for name, value in emulated.items() if name not in ("addresses", "interface")},
        **{name: package_version(name) for name in ("xfuser-cocodiff", "torch", "xfuser", "diffusers")},
    }


def describe_rank() -> dict[str, Any]:
    """Return the part of the description that differs between ranks: host, device and number of threads."""
    device = compute_device()
    name = torch.get_device_module(device).get_device_name() if device != devices.CPU else platform.machine()
    return {"host": platform.node(), "device": f"{device.type} {name}", "threads": torch.get_num_threads()}
