"""Predicts how long a recorded step takes from the rates of the links, without running it.

All ranks do the same, so one rank stands for all. Each rank has one port per axis, which its messages share: a message
gets an equal part of the port for as long as others use it too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.accelerator.program import Program, RecordedCollective
from benchmarks.accelerator.time_line import Instant

_ROUNDING_BYTES = 1e-3
"""Bytes below which a transfer is complete, because of rounding."""


class Links(Protocol):
    """Links of the ranks of a machine."""

    @property
    def rates(self) -> Mapping[str, float]:
        """Bytes per second of a rank along each axis."""

    def axis_to(self, rank: int) -> str:
        """Return the axis of the link from rank 0 to another rank."""

    def latency_seconds(self, ranks: Sequence[int]) -> float:
        """Return the seconds from the time at which a stream reaches a collective of some ranks to its first byte."""

    def contention(self, collective: RecordedCollective) -> float:
        """Return the factor by which a collective takes longer than its transfer."""


@dataclass(frozen=True)
class Outcome:
    """A predicted step. Times are seconds since it began."""

    seconds: float
    """When host and device are done."""
    marks: dict[str, float]
    """Times of the program's marks."""


def predict(program: Program, links: Links, has_communication: bool = True) -> Outcome:
    """Return the outcome of a recorded step.

    Args:
        program: the step.
        links: links of the machine.
        has_communication: whether collectives take time; else computation and host alone remain.
    """
    return _Prediction(program, links, has_communication).outcome()


class _Transfer:
    """A collective whose bytes are moving."""

    def __init__(self, collective: RecordedCollective, begin: float, remaining: dict[str, float]) -> None:
        self.collective, self.begin = collective, begin
        self.remaining = remaining
        """Bytes to send along each axis."""


class _Prediction:
    """State of one prediction."""

    def __init__(self, program: Program, links: Links, has_communication: bool) -> None:
        self._program, self._links, self._rates = program, links, links.rates
        self._has_communication = has_communication
        self._queues: dict[tuple[int, ...], list[RecordedCollective]] = {}
        for collective in program.collectives:
            self._queues.setdefault(collective.ranks, []).append(collective)
        self._free = dict.fromkeys(self._queues, 0.0)
        self._moving: list[_Transfer] = []
        self._ends: dict[RecordedCollective, float] = {}
        self._busy: set[tuple[int, ...]] = set()

    def outcome(self) -> Outcome:
        """Run the step event by event."""
        now = 0.0
        while self._moving or any(self._queues.values()):
            begins = {each: self._begin(each) for each in self._ready()}
            next_begin = min(begins.values(), default=float("inf"))
            left = min((self._seconds_left(each) for each in self._moving), default=float("inf"))
            if next_begin <= now + left:
                self._advance(max(next_begin - now, 0.0))
                now = max(next_begin, now)
                self._start(min(begins, key=lambda each: begins[each]), now)
            else:
                self._advance(left)
                now += left
                self._finish(now)
        marks = {name: instant.resolve(self._ends) for name, instant in self._program.marks.items()}
        return Outcome(self._program.end.resolve(self._ends), marks)

    def _ready(self) -> list[RecordedCollective]:
        """Return the next collective of each idle group whose start is known."""
        first = [queue[0] for group, queue in self._queues.items() if queue and group not in self._busy]
        return [each for each in first if self._is_known(each.start)]

    def _is_known(self, instant: Instant) -> bool:
        return all(end in self._ends for end in instant.offsets)

    def _begin(self, collective: RecordedCollective) -> float:
        """Return when the first byte of a collective moves."""
        reached = max(collective.start.resolve(self._ends), self._free[collective.ranks])
        return reached + (self._links.latency_seconds(collective.ranks) if self._has_communication else 0.0)

    def _start(self, collective: RecordedCollective, now: float) -> None:
        self._queues[collective.ranks].pop(0)
        self._busy.add(collective.ranks)
        remaining = dict[str, float]()
        for rank, size in zip(collective.ranks[1:], collective.sent[1:], strict=True):
            axis = self._links.axis_to(rank)
            remaining[axis] = remaining.get(axis, 0.0) + size * self._has_communication
        self._moving.append(_Transfer(collective, now, remaining))

    def _finish(self, now: float) -> None:
        for transfer in [each for each in self._moving if not any(each.remaining.values())]:
            self._moving.remove(transfer)
            collective = transfer.collective
            end = transfer.begin + self._links.contention(collective) * (now - transfer.begin)
            self._ends[collective] = self._free[collective.ranks] = end
            self._busy.remove(collective.ranks)

    def _seconds_left(self, transfer: _Transfer) -> float:
        """Return how long a transfer takes if the others go on."""
        seconds = (size * self._users(axis) / self._rates[axis] for axis, size in transfer.remaining.items() if size)
        return min(seconds, default=0.0)

    def _users(self, axis: str) -> int:
        """Return the number of transfers that use the port of an axis."""
        return sum(each.remaining.get(axis, 0.0) > 0 for each in self._moving)

    def _advance(self, seconds: float) -> None:
        """Move bytes for some time, in which no transfer begins or leaves a port."""
        shares = {axis: rate / max(1, self._users(axis)) for axis, rate in self._rates.items()}
        for transfer in self._moving:
            for axis, size in transfer.remaining.items():
                left = size - seconds * shares[axis]
                transfer.remaining[axis] = left if left > _ROUNDING_BYTES else 0.0
