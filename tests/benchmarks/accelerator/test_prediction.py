"""Times of a step whose transfers share ports, computed by hand."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from benchmarks.accelerator.prediction import Outcome, predict
from benchmarks.accelerator.program import Program, RecordedCollective
from benchmarks.accelerator.time_line import Instant

EVERYONE, PAIRS, NODES = (0, 1, 2, 3), (0, 1), (0, 2)


@dataclass
class TwoNodes:
    """Links of two nodes of two GPUs."""

    latency: float = 0.0
    """Seconds for each rank of a collective."""
    slowed: RecordedCollective | None = None
    """Takes three times as long as its bytes."""
    rates = {"gpu": 100.0, "node": 10.0}  # noqa: RUF012

    def axis_to(self, rank: int) -> str:
        return "gpu" if rank == 1 else "node"

    def latency_seconds(self, ranks: Sequence[int]) -> float:
        return self.latency * len(ranks)

    def contention(self, collective: RecordedCollective) -> float:
        return 3.0 if collective is self.slowed else 1.0


def outcome(*collectives: RecordedCollective, links: TwoNodes | None = None) -> Outcome:
    end = Instant()
    for collective in collectives:
        end = end.after_collective(collective)
    return predict(Program([*collectives], end=end), links or TwoNodes())


def collective(ranks: tuple[int, ...], start: float, *sent: int) -> RecordedCollective:
    return RecordedCollective(ranks, Instant(start), (99, *sent))


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
        ([collective(NODES, 5, 10), collective(NODES, 0, 10)], 7),
    ],
)
def test_transfers_share_their_ports(collectives: list[RecordedCollective], seconds: float) -> None:
    assert outcome(*collectives).seconds == pytest.approx(seconds)


def test_kernels_latency_and_contention_are_counted() -> None:
    first = collective(NODES, 1, 10)
    second = RecordedCollective(NODES, Instant().after_collective(first).after(2), (0, 20))
    links = TwoNodes(0.25, slowed=second)
    assert outcome(first, second, links=links).seconds == pytest.approx((1 + 0.5 + 1) + (2 + 0.5 + 3 * 2))
    program = Program([first, second], end=Instant().after_collective(second))
    assert predict(program, links, has_communication=False).seconds == pytest.approx(1 + 2)
