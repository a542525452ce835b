"""Reading of the memory of a rank's device."""

import functools
import os
import sys
from collections.abc import Callable

import torch

from xfuser_cocodiff.engine.topology import launcher
from xfuser_cocodiff.engine.topology.device_memory import DeviceMemory
from xfuser_cocodiff.engine.topology.devices import CPU
from xfuser_cocodiff.xdit.platforms import local_device


def reader(device_type: str) -> Callable[[], DeviceMemory | None] | None:
    """Return a function that reads the memory of this rank's device.

    Args:
        device_type: type of the device, as PyTorch names it.

    Returns:
        The function, which returns None where the driver does not tell. None on CPUs, where other processes decide
        what is free.
    """
    return None if device_type == CPU.type else functools.partial(_read, device_type)


def _read(device_type: str) -> DeviceMemory | None:
    module, ranks = torch.get_device_module(device_type), _ranks_per_device()
    try:
        free, total = module.mem_get_info()
        cached = module.memory_reserved() - module.memory_allocated()
    except (AttributeError, RuntimeError):
        return None
    return DeviceMemory(free / ranks + cached, total / ranks)


def _ranks_per_device() -> int:
    """Return the number of ranks that share a device of this node."""
    devices = torch.accelerator.device_count()
    if not local_device.shares_device(os.environ, sys.argv, devices):
        return 1
    return -(-(launcher.ranks_per_node(os.environ) or 1) // devices)
