"""Dilation and thinning: slow enough for the cores, and within what links can be shaped to."""

import os
from dataclasses import replace

import pytest

from tests.lab.cluster_bench.programs import one_block
from xfuser_cocodiff.lab.cluster_bench import speed_choice
from xfuser_cocodiff.lab.cluster_bench.cell import Cell
from xfuser_cocodiff.lab.cluster_bench.measurement import SLOWER, Speed
from xfuser_cocodiff.lab.cluster_bench.speed_choice import choose_speed
from xfuser_cocodiff.lab.emulation import dilation
from xfuser_cocodiff.lab.simulation.machines import MACHINES

CELLS = [Cell(machine, nodes, "flux.1-dev", 1024) for machine in MACHINES.values() for nodes in (1, 2)]
STEP = 0.01


def choose(cell: Cell, message_bytes: int, requested: float | None = None, step: float = STEP) -> Speed:
    """Return the speed for one recorded step with one flat all-to-all."""
    return choose_speed(cell, [one_block(cell.topology.size, message_bytes, step, 0.0)], [step], 3, requested)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.machine.name}-{cell.nodes}")
@pytest.mark.parametrize("message_bytes", [100, 100_000, 10_000_000])
def test_links_can_be_emulated_at_both_dilations(cell: Cell, message_bytes: int) -> None:
    lowest, highest = speed_choice.dilations(cell)
    for requested in (None, 1.0001 * lowest, 0.9999 * highest):
        speed = choose(cell, message_bytes, requested)
        assert speed.repeats == 3 and speed.thinning >= 1
        assert requested is None or speed.dilation == requested
        for factor in (1, SLOWER):  # raises if a link cannot be emulated
            dilation.slow_cluster(cell.profile, factor * speed.dilation * speed.thinning)


def test_a_step_is_long_enough_and_leaves_the_cores_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(MACHINES["aurora"], 2, "flux.1-dev", 1024)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    small, large = choose(Cell(MACHINES["pcie"], 1, "flux.1-dev", 1024), 1000), choose(cell, 30_000_000)
    assert small.thinning == 1 and small.dilation * STEP == pytest.approx(speed_choice._STEP_SECONDS, rel=0.05)
    assert large.thinning > 1 and large.dilation > small.dilation
    busy = 24 * 23 * (30_000_000 / large.thinning * 3.7e-9 + 100e-6)
    assert busy / 2 == pytest.approx(speed_choice._BUSY_SHARE * large.dilation * STEP, rel=0.1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    assert choose(cell, 30_000_000).dilation < large.dilation / 4


def test_thinned_messages_are_larger_than_their_headers() -> None:
    cell = Cell(MACHINES["dgx-h100"], 1, "flux.1-dev", 1024)
    assert choose(cell, 300_000).thinning == 9
    assert choose(replace(cell, nodes=2), 20_000).thinning == 1
