"""Registers the device type of emulated accelerators, and its backend of torch.distributed, with PyTorch."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup
from torch.utils import backend_registration

DEVICE_TYPE = BACKEND = "emulated"
"""PyTorch's names of the device type, and of its backend of torch.distributed."""


class _DeviceModule(backend_registration._DummyBackendModule):
    """The module torch.emulated, which PyTorch and the plugin ask about the device."""

    def get_device_name(self, device: object = None) -> str:
        """Return the name of the device."""
        return DEVICE_TYPE


@functools.cache
def register() -> torch.device:
    """Register device type and backend in this process, permanently, and return the device.

    Collectives of the backend return at once, without communication: one process records for all ranks.

    Raises:
        RuntimeError: this PyTorch has no devices that are written in Python.
    """
    make_device = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if make_device is None:
        raise RuntimeError(f"emulated accelerators need PyTorch 2.10 or later, not {torch.__version__}")
    make_device(DEVICE_TYPE, backend_module=_DeviceModule())
    dist.Backend.register_backend(BACKEND, _new_group, extended_api=True, devices=["cpu", DEVICE_TYPE])
    return torch.device(DEVICE_TYPE, 0)


def _new_group(options: Any, _: object) -> Any:
    return FakeProcessGroup._create_internal(options.group_rank, options.group_size, FakeProcessGroup.Options())
