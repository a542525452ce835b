"""Tests of predictions without running: times of a step whose transfers share ports, computed by hand."""

import pytest

from xfuser_cocodiff.lab.accelerator.prediction import predict
from xfuser_cocodiff.lab.accelerator.program import GroupPattern, Program, RecordedCollective
from xfuser_cocodiff.lab.accelerator.time_line import Instant
from xfuser_cocodiff.lab.accelerator.transport import Outcome, Pace

EVERYONE, PAIRS, NODES = GroupPattern.of(range(4)), GroupPattern.of([0, 1]), GroupPattern.of([0, 2])
RATES = {"gpu": 100.0, "node": 10.0}


def axis_to(rank: int) -> str:
    """Return the axis of the link from rank 0, in two nodes of two GPUs."""
    return "gpu" if rank == 1 else "node"


def outcome(*collectives: RecordedCollective, pace: Pace | None = None) -> Outcome:
    end = Instant()
    for collective in collectives:
        end = end.after_collective(collective)
    return predict(Program([*collectives], end=end), pace or Pace(1.0), RATES, axis_to)


def collective(group: GroupPattern, start: float, *sent: int) -> RecordedCollective:
    return RecordedCollective(group, Instant(start), (99, *sent), (99, *sent))


@pytest.mark.parametrize(
    ("collectives", "seconds"),
    [
        ([collective(PAIRS, 2, 300)], 2 + 3),
        ([collective(NODES, 0, 20)], 2),
        ([collective(EVERYONE, 0, 300, 20, 20)], 4),  # the ports of both axes work side by side
        ([collective(EVERYONE, 0, 300, 5, 5)], 3),
        ([collective(PAIRS, 0, 300), collective(NODES, 0, 20)], 3),
        ([collective(NODES, 0, 20), collective(NODES, 0, 20)], 4),  # one after the other in a group
        ([collective(NODES, 0, 20), collective(EVERYONE, 1, 0, 10, 0)], 3),  # after 1 s both have half of the port
        ([collective(NODES, 0, 40), collective(EVERYONE, 1, 0, 10, 0)], 5),
        ([collective(NODES, 5, 10), collective(NODES, 0, 10)], 7),
    ],
)
def test_transfers_share_their_ports(collectives: list[RecordedCollective], seconds: float) -> None:
    assert outcome(*collectives).seconds == pytest.approx(seconds)


def test_kernels_latency_and_contention_are_counted() -> None:
    first = collective(NODES, 1, 10)
    second = RecordedCollective(NODES, Instant().after_collective(first).after(2), (0, 20), (0, 20))
    pace = Pace(1.0, latency=lambda ranks: 0.25 * len(ranks), contention=lambda each: 3.0 if each is second else 1.0)
    predicted = outcome(first, second, pace=pace)
    assert predicted.seconds == pytest.approx((1 + 0.5 + 1) + (2 + 0.5 + 3 * 2))
    assert predicted.sent_bytes == {2: 30}


def test_instant_collectives_only_wait_for_their_stream_and_group() -> None:
    first, second, third = collective(NODES, 0, 20), collective(NODES, 1, 20), collective(NODES, 0, 10)
    program = Program([first, second, third], {"second": Instant().after_collective(second)})
    program.end = Instant().after_collective(third)
    pace = Pace(1.0, latency=lambda ranks: 0.5)
    predicted = predict(program, pace, RATES, axis_to, [second])
    assert predicted.marks["second"] == pytest.approx(0.5 + 2)
    assert predicted.seconds == pytest.approx(0.5 + 2 + 0.5 + 1)


def test_collectives_that_wait_for_each_other_are_refused() -> None:
    first, second = collective(NODES, 0, 1), collective(PAIRS, 0, 1)
    first.start, second.start = Instant(0, {second: 0.0}), Instant(0, {first: 0.0})
    with pytest.raises(ValueError, match="wait for each other"):
        outcome(first, second)
