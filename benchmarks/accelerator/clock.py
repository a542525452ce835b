"""Times of host and device in a step that is being recorded: of streams and events, with the interface of PyTorch's.

Kernels of all streams share the device. The main stream computes; the others have a higher priority and short kernels.
So a kernel on another stream starts at once and takes its duration from the main stream, at the place in the main
stream's queue at which the host launches it. Only collectives run beside kernels.
"""

from collections.abc import Sequence

from benchmarks.accelerator.program import Program, RecordedCollective
from benchmarks.accelerator.time_line import Instant
from xfuser_cocodiff.tools.accelerator.accelerators import Accelerator


class Clock:
    """Records what host and device do, and when.

    Args:
        accelerator: speed of the device.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.host_time = Instant()
        """What the host has reached; it is ahead of the device unless it waits."""
        self.streams = [Stream(self)]
        """The current stream, last, and those that it has replaced; the main stream is the first."""
        self.program = Program()
        """What has been recorded since the step began."""
        self._made: list[Stream] = []

    def begin_step(self) -> None:
        """Begin to record a step, on an idle host and device."""
        self.program, self.host_time = Program(), Instant()
        for stream in (*self.streams, *self._made):
            stream.tail = Instant()

    def end_step(self) -> Program:
        """Return everything since the step began. The step ends when host and device have nothing left to do."""
        end = self.host_time
        for collective in self.program.collectives:
            end = end.after_collective(collective)
        for stream in (*self.streams, *self._made):
            end = end.latest(stream.tail)
        self.program.end = end
        return self.program

    def mark(self, name: str) -> None:
        """Record the end of everything in the current stream so far under a name."""
        self.program.marks[name] = self.streams[-1].tail.latest(self.host_time)
        self.program.sent_at[name] = self.program.sent.copy()

    def launch(self, seconds: float) -> None:
        """Launch a kernel on the current stream, given its duration."""
        self.spend_host_time(self.accelerator.launch_seconds)
        self.streams[-1].launch(seconds)
        self.program.kernels.append(seconds)

    def spend_host_time(self, seconds: float) -> None:
        """Let the host be busy for some time."""
        self.host_time = self.host_time.after(seconds)

    def spend_call_time(self) -> None:
        """Let the host be busy with a call that launches no kernel, such as a view or an event."""
        self.spend_host_time(self.accelerator.launch_seconds / 8)  # assumed

    def new_stream(self) -> "Stream":
        """Return another stream of the device."""
        self._made.append(Stream(self))
        return self._made[-1]

    def start_collective(
        self, ranks: Sequence[int], sent: Sequence[int], is_gather: bool = False
    ) -> RecordedCollective:
        """Record a collective that starts behind the current stream.

        Args:
            ranks: the members of its group; this rank is the first of them.
            sent: bytes for each of them.
            is_gather: whether all of them are sent the same block.
        """
        self.spend_host_time(self.accelerator.collective_host_seconds)
        start = self.streams[-1].tail.latest(self.host_time)
        collective = RecordedCollective(tuple(ranks), start, tuple(sent), is_gather)
        self.program.collectives.append(collective)
        for rank, size in zip(ranks[1:], sent[1:], strict=True):
            self.program.sent[rank] += size
        return collective

    def wait_for(self, collective: RecordedCollective) -> None:
        """Let the current stream wait for a collective; those of earlier steps have ended."""
        if collective in self.program.collectives:
            stream = self.streams[-1]
            stream.tail = stream.tail.after_collective(collective)


class Stream:
    """Queue of kernels that run one after the other.

    Args:
        clock: times of host and device.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.tail = Instant()
        """End of everything queued so far."""

    def launch(self, seconds: float) -> None:
        """Queue a kernel, given its duration."""
        self.tail = self.tail.latest(self._clock.host_time).after(seconds)
        main = self._clock.streams[0]
        if self is not main:
            main.tail = main.tail.after(seconds)

    def record_event(self) -> "Event":
        """Return an event that marks the end of everything queued so far."""
        self._clock.spend_call_time()
        return Event(self._clock, self.tail.latest(self._clock.host_time))

    def wait_event(self, event: "Event") -> None:
        """Queue the wait for an event."""
        self._clock.spend_call_time()
        self.tail = self.tail.latest(event.instant)

    def synchronize(self) -> None:
        """Let the host wait until everything queued so far has ended."""
        self._clock.host_time = self._clock.host_time.latest(self.tail)

    def __enter__(self) -> "Stream":
        self._clock.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._clock.streams.pop()


class Event:
    """Mark in a stream.

    Args:
        clock: times of host and device.
        instant: when it passes.
    """

    def __init__(self, clock: Clock, instant: Instant) -> None:
        self._clock, self._instant, self._program = clock, instant, clock.program

    @property
    def instant(self) -> Instant:
        """When the event passes; the begin of the step if it was recorded in an earlier one."""
        return self._instant if self._program is self._clock.program else Instant()

    def synchronize(self) -> None:
        """Let the host wait until the event has passed."""
        self._clock.host_time = self._clock.host_time.latest(self.instant)
