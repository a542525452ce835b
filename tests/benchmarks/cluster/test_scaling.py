"""Steps of all blocks from the recorded ones, against recordings of all blocks."""

from dataclasses import replace

import pytest

from benchmarks.accelerator.clock import Clock
from benchmarks.accelerator.prediction import predict
from benchmarks.accelerator.program import Program
from benchmarks.cluster.cell import Cell
from benchmarks.cluster.rows import full_step_bytes, full_step_seconds
from xfuser_cocodiff.tools.accelerator.accelerators import Accelerator
from xfuser_cocodiff.tools.simulation.machines import MACHINES

MS, KIND, COUNT, CALLS = 1e-3, "block", 40, 2
HOST_BOUND = Accelerator("host-bound", 1e9, 1e9, 1e9, 1e9, 0.0, launch_seconds=MS, collective_host_seconds=0.0)
"""An accelerator whose launches take 1 ms."""
SMALL, LARGE = (0.1 * MS,) * 8, (7 * MS,)
"""Kernels of a block of 9 launches: the device needs 7.8 ms of the host's 9 ms, most of it after the last launch."""


def recorded(blocks: int, message_bytes: int = 0) -> Program:
    """Return a step of blocks, each with small kernels, an all-to-all, and a large kernel."""
    clock = Clock(HOST_BOUND)
    clock.begin_step()
    for index in range(blocks):
        clock.mark(f"{KIND} {index} begin")
        for seconds in SMALL:
            clock.launch(seconds)
        clock.wait_for(clock.start_collective(range(8), (message_bytes,) * 8))
        for seconds in LARGE:
            clock.launch(seconds)
        clock.mark(f"{KIND} {index} end")
    return clock.end_step()


def cell(blocks: int) -> Cell:
    """Return a cell whose step has two calls of 40 equal blocks."""
    machine = replace(MACHINES["dgx-h100"], launch_seconds=0.0)
    return Cell(machine, 1, "wan2.1-14b", 480, blocks=blocks)


@pytest.mark.parametrize("message_bytes", [0, 50_000_000, 400_000_000])
def test_two_blocks_stand_for_a_step_whose_first_block_waits_for_the_host(message_bytes: int) -> None:
    whole = predict(recorded(COUNT, message_bytes), cell(COUNT)).seconds
    assert full_step_seconds(cell(2), recorded(2, message_bytes)) == pytest.approx(CALLS * whole)
    assert full_step_seconds(cell(COUNT), recorded(COUNT, message_bytes)) == pytest.approx(CALLS * whole)


def test_one_block_alone_waits_for_the_host_longer_than_others_do() -> None:
    assert full_step_seconds(cell(1), recorded(1)) == pytest.approx(CALLS * COUNT * (9 + 7) * MS)
    assert predict(recorded(COUNT), cell(COUNT)).seconds == pytest.approx((COUNT * 9 + 7) * MS)


def test_bytes_count_each_block_once() -> None:
    sent = {axis: full_step_bytes(cell(2), axis, recorded(2, 1000)) for axis in ("gpu", "node")}
    assert sent == {"gpu": 7000 * CALLS * COUNT, "node": 0}
