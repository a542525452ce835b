"""One gloo device for all groups of a process.

A device has a thread that wakes a hundred times a second to see whether it is to end. PyTorch gives one to every group,
and xDiT makes groups for all ways in which it may part ranks, 25 a rank, most of which it never uses. Ranks that share
a processor lose a tenth of it to these threads.
"""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from xfuser_cocodiff.xdit.patching.patch import Patch


def patches() -> list[Patch]:
    """The row that has groups share the device of their world."""
    return [Patch("torch.distributed", "new_group", "gives each gloo group a thread that never rests", _sharing)]


def _sharing(new_group: Callable) -> Callable:
    @functools.wraps(new_group)
    def sharing(*args: Any, **kwargs: Any) -> Any:
        try:
            backend = _beside_world()
        except AttributeError:  # of the private names that this goes by; groups are worth more than their devices
            backend = None
        if backend is None:
            return new_group(*args, **kwargs)
        # It has no argument for a gloo group's device: the backend that it makes has to bring it.
        with mock.patch.object(dist.distributed_c10d, "ProcessGroupGloo", backend):
            return new_group(*args, **kwargs)

    return sharing


def _beside_world() -> "type[dist.ProcessGroupGloo] | None":
    """The backend of groups that share the devices of the world, if gloo carries its messages between CPUs."""
    if not (dist.is_gloo_available() and dist.is_initialized()):
        return None
    if torch.device("cpu") not in dist.group.WORLD._device_types:
        return None
    world = dist.group.WORLD._get_backend(torch.device("cpu"))
    return _beside(world) if isinstance(world, dist.ProcessGroupGloo) else None


def _beside(world: "dist.ProcessGroupGloo") -> "type[dist.ProcessGroupGloo]":
    """The backend of groups that have the devices of another one."""
    new_options, devices, threads = dist.ProcessGroupGloo._Options, world.options._devices, world.options._threads

    class OnTheSameDevices(dist.ProcessGroupGloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **more: Any) -> None:
            options = new_options()
            # More is asked since PyTorch 2.15, by names that options have too.
            wanted = {"_devices": devices, "_threads": threads, "_timeout": timeout, **more}
            if not all(hasattr(options, name) for name in wanted):  # what cannot be said counts for more than a device
                super().__init__(store, rank, size, timeout=timeout, **more)
                return
            for name, value in wanted.items():
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    return OnTheSameDevices
