"""Times of recorded steps that need no run, and which overlap schedule they choose."""

from dataclasses import replace

import pytest

from tests.lab.cluster_bench.programs import one_block
from xfuser_cocodiff.engine.topology.link_profile import AxisLink
from xfuser_cocodiff.lab.accelerator.program import GroupPattern, Program, RecordedCollective
from xfuser_cocodiff.lab.accelerator.time_line import Instant
from xfuser_cocodiff.lab.cluster_bench.cell import Cell
from xfuser_cocodiff.lab.cluster_bench.recorded_times import predict_step, without_communication
from xfuser_cocodiff.lab.cluster_bench.schedule_choice import choose_programs
from xfuser_cocodiff.lab.simulation.machines import DGX_H100
from xfuser_cocodiff.xdit.session.schedule_tuner import MIN_SAVING


def two_streams(message_bytes: int) -> Program:
    """Return a step whose second all-to-all waits for the first one and for a kernel beside it."""
    group, sizes = GroupPattern.of(range(8)), (message_bytes,) * 8
    first = RecordedCollective(group, Instant(0.001), sizes, sizes)
    beside = Instant(0.003)
    second = RecordedCollective(group, Instant().after_collective(first).after(0.0005).latest(beside), sizes, sizes)
    return Program([first, second], {}, {}, Instant().after_collective(second).after(0.001))


@pytest.mark.parametrize(
    ("program", "seconds"), [(one_block(8, 10**6, 0.002, 0.001), 0.003), (two_streams(10**6), 0.004)]
)
def test_without_communication_equals_links_of_any_bandwidth(program: Program, seconds: float) -> None:
    links = (AxisLink("node", 0.0, 1e16), AxisLink("gpu", 0.0, 1e16))
    fast = Cell(replace(DGX_H100, links=links, launch_seconds=0.0), 1, "flux.1-dev", 1024)
    assert without_communication(program).seconds == pytest.approx(seconds)
    assert predict_step(fast, program).seconds == pytest.approx(seconds, rel=1e-3)


def test_a_prediction_adds_latency_and_transfer() -> None:
    cell, message = Cell(DGX_H100, 1, "flux.1-dev", 1024), 10**6
    seconds = predict_step(cell, one_block(8, message, 0.002, 0.001)).seconds
    assert seconds == pytest.approx(0.003 + 18e-6 + 7 * 0.5e-6 + 7 * message / 370e9, rel=1e-6)


def test_another_schedule_must_save_enough() -> None:
    alternatives = {"step": ["other"]}
    for saving, chosen in ((0.9 * MIN_SAVING, "step"), (1.1 * MIN_SAVING, "other"), (-1.0, "step")):
        seconds = {"step": 1.0, "other": 1 - saving, "keyframe": 2.0}
        assert choose_programs(["step", "keyframe"], alternatives, seconds) == {"step": chosen, "keyframe": "keyframe"}
