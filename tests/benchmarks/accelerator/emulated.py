"""An emulated accelerator for tests, in a rank of its own: PyTorch keeps the device type for the whole process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from xfuser_cocodiff.tools.accelerator.accelerators import Accelerator

if TYPE_CHECKING:
    from benchmarks.accelerator.device import EmulatedAccelerator

LAUNCH, COLLECTIVE, SHORTEST = 8e-3, 0.5, 1e-3
CALL = LAUNCH / 8
"""Host time of a launch, of a collective and of a call without a kernel; duration of the shortest kernel."""
ROUND = Accelerator("round", 1e9, 1e8, 1e7, 1e6, SHORTEST, LAUNCH, COLLECTIVE)
"""Round figures: FLOP/s of linear layers, of attention and of narrow attention, bytes/s."""


@contextmanager
def accelerator(ranks: int = 1) -> Iterator["EmulatedAccelerator"]:
    """Yield an accelerator that records a step on rank 0 of a group."""
    from benchmarks.accelerator import device, device_type

    device_type.register()
    dist.destroy_process_group()
    os.environ.update(RANK="0", WORLD_SIZE=str(ranks), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    dist.init_process_group(device_type.BACKEND, store=FakeStore(), rank=0, world_size=ranks)
    with device.EmulatedAccelerator(ROUND) as emulator, torch.inference_mode():
        emulator.begin_step()
        yield emulator
