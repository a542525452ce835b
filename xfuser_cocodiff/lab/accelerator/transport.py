"""Runs recorded steps in real time: collectives wait for their start and move bytes over gloo.

Each group has a communicator, as in NCCL: its collectives run one after the other, beside those of other groups. Sends
and receives to all peers are posted at once. The values of messages do not matter, so a message may be thinned: with a
thinning of N, 1 / N of its bytes move, over links that are N times slower still.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from xfuser_cocodiff.lab.accelerator.program import GroupPattern, Program, RecordedCollective
from xfuser_cocodiff.lab.accelerator.time_line import Instant

_TAG = 0
_HEADER_BYTES = 8
"""First bytes of each message: when its sender reached the collective, as float64."""
_SPIN_SECONDS = 2e-4
_START_MARGIN = 0.02
"""Seconds between the agreement on the begin of a step and the begin."""


@dataclass(frozen=True)
class Pace:
    """How a recorded step runs."""

    dilation: float
    """Real seconds for each second of the machine."""
    thinning: int = 1
    """Part of a message's bytes that moves is 1 / thinning."""
    latency: Callable[[Sequence[int]], float] = lambda ranks: 0.0
    """Returns the seconds from the time at which a stream reaches a collective to its first byte, given the ranks of
    its group."""
    contention: Callable[[RecordedCollective], float] = lambda collective: 1.0
    """Returns the factor by which a collective takes longer than its transfer."""
    unshaped: Callable[[dict[int, int]], float] = lambda sent: 0.0
    """Returns the real seconds by which emulated links move messages too fast, given the bytes to each global rank."""


@dataclass(frozen=True)
class Outcome:
    """A step that has run. Times are seconds of the machine since the step began."""

    seconds: float
    """When host and device were done."""
    marks: dict[str, float]
    """Times of the program's marks."""
    late_seconds: float
    """Longest time by which a collective started late, because the cores were busy."""
    sent_bytes: dict[int, int]
    """Bytes that really moved to each other global rank."""


class _Communicator:
    """Moves the messages of one group."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks, self._own = ranks, ranks.index(dist.get_rank())
        self._group = dist.new_group(ranks, backend=dist.Backend.GLOO, use_local_synchronization=True)
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}

    def peer(self, distance: int) -> int:
        """Return the index of the member that stands some places after this rank."""
        return (self._own + distance) % len(self.ranks)

    def transfer(self, start: float, sent: Sequence[int], received: Sequence[int]) -> float:
        """Exchange messages with all other members, wait until all have arrived, and return the latest start.

        Args:
            start: when this rank reached the collective.
            sent: bytes for the member at each distance.
            received: bytes from the member at each distance.
        """
        works, arrived = [], []
        for distance in range(len(self.ranks) - 1, 0, -1):
            if received[distance]:
                buffer = self._buffer(received[distance], distance)
                arrived.append(buffer)
                works.append(self._group.recv([buffer], self.peer(distance), _TAG))
        for distance in range(1, len(self.ranks)):
            if sent[distance]:
                buffer = self._buffer(sent[distance], 0)
                _start_in(buffer).fill_(start)
                works.append(self._group.send([buffer], self.peer(distance), _TAG))
        for work in works:
            work.wait()
        return max([start, *(_start_in(buffer).item() for buffer in arrived)])

    def _buffer(self, size: int, distance: int) -> torch.Tensor:
        """Return host memory for a message from the member at a distance, or to all members for distance 0."""
        key = 1 << math.ceil(math.log2(size)), distance
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(key[0], dtype=torch.uint8)
        return self._buffers[key][:size]


class Transport:
    """The communicators of this rank for some programs. All ranks must create it, with the same programs.

    Args:
        programs: recorded steps.
    """

    def __init__(self, programs: Iterable[Program]) -> None:
        patterns = dict.fromkeys(each.group for program in programs for each in program.collectives)
        self._communicators = {pattern: _Communicator(pattern.members(dist.get_rank())) for pattern in patterns}

    def run(self, program: Program, pace: Pace) -> Outcome:
        """Run a recorded step in real time, together with all other ranks."""
        run = _Run(program, pace, self._communicators)
        begin = torch.tensor([time.monotonic() + _START_MARGIN], dtype=torch.float64)
        dist.all_reduce(begin, dist.ReduceOp.MAX)
        return run.outcome(begin.item())


class _Run:
    """One run of a recorded step."""

    def __init__(self, program: Program, pace: Pace, communicators: dict[GroupPattern, _Communicator]) -> None:
        self._program, self._pace, self._communicators = program, pace, communicators
        self._ends: dict[RecordedCollective, float] = {}
        """Ends so far, in seconds of the machine since the step began."""
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._late = 0.0
        self._sent: Counter[int] = Counter()

    def outcome(self, begin: float) -> Outcome:
        """Run the step from a time of time.monotonic on, and return its outcome."""
        groups = self._program.by_group()
        with ThreadPoolExecutor(max(1, len(groups))) as threads:
            for collectives in groups.values():
                threads.submit(self._run_group, collectives, begin)
        if self._error is not None:
            raise self._error
        marks = {name: instant.resolve(self._ends) for name, instant in self._program.marks.items()}
        return Outcome(self._program.end.resolve(self._ends), marks, self._late, dict(self._sent))

    def _run_group(self, collectives: list[RecordedCollective], begin: float) -> None:
        free = 0.0
        try:
            for collective in collectives:
                free = self._run_collective(collective, begin, free)
                with self._changed:
                    self._ends[collective] = free
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _run_collective(self, collective: RecordedCollective, begin: float, free: float) -> float:
        """Run a collective and return its end.

        Args:
            collective: the collective.
            begin: begin of the step, a time of time.monotonic.
            free: end of the group's previous collective.
        """
        pace, communicator = self._pace, self._communicators[collective.group]
        start = max(free, self._wait_for(collective.start)) + pace.latency(communicator.ranks)
        real_start = begin + start * pace.dilation
        _sleep_until(real_start)
        started = time.monotonic()
        sent, received = (_thinned(sizes, pace.thinning) for sizes in (collective.sent, collective.received))
        begun = communicator.transfer(start, sent, received)
        by_rank = {communicator.ranks[communicator.peer(each)]: size for each, size in enumerate(sent) if each and size}
        end = start + (time.monotonic() - real_start + pace.unshaped(by_rank)) / pace.dilation
        with self._changed:
            self._late = max(self._late, (started - real_start) / pace.dilation)
            self._sent.update(by_rank)
        # Contention acts once all members take part, so that members who wait for a late one stay together.
        return begun + pace.contention(collective) * max(0.0, end - begun)

    def _wait_for(self, instant: Instant) -> float:
        """Wait until all collectives that an instant depends on have ended, and return its time."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or all(end in self._ends for end in instant.offsets))
            if self._error is not None:
                raise self._error
            return instant.resolve(self._ends)


def _sleep_until(at: float) -> None:
    while (remaining := at - time.monotonic()) > 0:
        time.sleep(remaining if remaining > _SPIN_SECONDS else 0)


def _thinned(sizes: Sequence[int], thinning: int) -> list[int]:
    """Return the bytes of messages that move: at least the header of each, so that both ends wait for each other."""
    return [max(_HEADER_BYTES, size // thinning) if size else 0 for size in sizes]


def _start_in(buffer: torch.Tensor) -> torch.Tensor:
    """Return the header of a message."""
    return buffer[:_HEADER_BYTES].view(torch.float64)
