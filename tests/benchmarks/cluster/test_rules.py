"""Rules of other systems on an emulated accelerator: bytes of collectives and kernels, and launches."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.accelerator import device, device_type
from benchmarks.accelerator.device import EmulatedAccelerator
from benchmarks.accelerator.program import KERNEL_SECONDS, LAUNCHES
from benchmarks.cluster import fp4_ulysses
from benchmarks.cluster.ring_rules import gathered_attention, residual_attention, residual_bytes
from tests import ranks
from xfuser_cocodiff.tools.accelerator.accelerators import ACCELERATORS

SHAPE = (1, 24, 9216, 128)
VALUES = torch.Size(SHAPE).numel()
RANKS = 4


@contextmanager
def accelerator() -> Iterator[tuple[EmulatedAccelerator, list[torch.Tensor]]]:
    """Return a context with an H100 of four, and Q, K and V on it."""
    emulated = device_type.register()
    dist.destroy_process_group()
    os.environ.update(RANK="0", WORLD_SIZE=str(RANKS))
    dist.init_process_group(device_type.BACKEND, store=FakeStore(), rank=0, world_size=RANKS)
    with device.EmulatedAccelerator(ACCELERATORS["h100-sxm"]) as emulator, torch.inference_mode():
        yield emulator, [torch.empty(SHAPE, dtype=torch.bfloat16, device=emulated) for _ in range(3)]


def run_fp4(rank: int) -> tuple[int, float, int]:
    """Return launches, kernel seconds and sent bytes of one attention by FP4."""
    with accelerator() as (emulator, tensors):
        emulator.begin_step()
        received = fp4_ulysses.exchange_inputs(dist.group.WORLD, emulator, tensors)
        assert all(each.shape == (1, 6, 4 * 9216, 128) for each in received)
        assert fp4_ulysses.exchange_output(dist.group.WORLD, emulator, received[0]).shape == SHAPE
        program = emulator.end_step()
        sent = sum(sum(each.sent) for each in program.collectives)
        return int(program.totals[LAUNCHES]), program.totals[KERNEL_SECONDS], sent


def test_fp4_kernels_cost_their_bytes_on_an_accelerator() -> None:
    [(launches, seconds, sent)] = ranks.run(run_fp4, 1)
    coded = 4 * VALUES * 4.5 / 8
    # Q, K and V are one message, and O another; each is encoded and decoded.
    assert (launches, sent) == (2 + 2, coded)
    # All of Q, K, V and O are read once and written once in bf16, and their codes are written and read.
    bandwidth = ACCELERATORS["h100-sxm"].bytes_per_second
    assert seconds == pytest.approx((4 * 2 * 2 * VALUES + 2 * coded) / bandwidth, rel=1e-6)


def run_rings(rank: int) -> list[list[tuple[int, ...]]]:
    """Return the bytes sent to each rank by each collective of a gathering ring, and of residuals."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
        assert key.shape == value.shape
        return query, query[..., 0].float()

    found = []
    with accelerator() as (emulator, tensors):
        emulator.begin_step()
        gathered_attention(dist.group.WORLD, attend, *tensors, {})
        found.append([each.sent for each in emulator.end_step().collectives])
        emulator.begin_step()
        assert residual_attention(dist.group.WORLD, emulator, attend, *tensors, {}).shape == SHAPE
        found.append([each.sent for each in emulator.end_step().collectives])
    return found


def test_rings_send_k_and_v_or_their_residuals() -> None:
    [[gathered, residuals]] = ranks.run(run_rings, 1)
    both = 2 * VALUES * 2
    assert gathered == [(both,) * RANKS]
    assert [sum(sent) for sent in residuals] == [residual_bytes((2, *SHAPE))] * (RANKS - 1)
    assert residual_bytes((2, *SHAPE)) / (2 * VALUES) == pytest.approx(0.25, abs=0.003)
