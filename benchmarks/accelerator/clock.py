"""Times of host and device in a step that is being recorded."""

from collections.abc import Sequence

from benchmarks.accelerator.program import HOST_SECONDS, KERNEL_SECONDS, LAUNCHES, Program, RecordedCollective
from benchmarks.accelerator.streams import Stream
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
        self.num_steps = 0
        """Number of steps begun."""
        self._made: list[Stream] = []
        self._last: dict[tuple[int, ...], RecordedCollective] = {}
        """The last collective of each group in this step."""

    def begin_step(self) -> None:
        """Begin to record a step, on an idle host and device."""
        self.program, self.host_time = Program(), Instant()
        self.num_steps += 1
        self._last.clear()
        for stream in (*self.streams, *self._made):
            stream.tail = Instant()

    def end_step(self) -> Program:
        """Return everything since the step began. The step ends when host and device have nothing left to do."""
        self.program.end = self.host_time.latest(self._device_end())
        return self.program

    def synchronize(self) -> None:
        """Let the host wait until the device has ended everything queued so far, in all streams and groups."""
        self.host_time = self.host_time.latest(self._device_end())

    def _device_end(self) -> Instant:
        end = Instant()
        for collective in self._last.values():
            end = end.after_collective(collective)
        for stream in (*self.streams, *self._made):
            end = end.latest(stream.tail)
        return end

    def mark(self, name: str) -> None:
        """Record the end of everything in the current stream so far under a name."""
        self.program.marks[name] = self.streams[-1].tail.latest(self.host_time)
        self.program.totals_at[name] = self.program.totals.copy()

    def launch(self, seconds: float) -> None:
        """Launch a kernel on the current stream, given its duration."""
        self.spend_host_time(self.accelerator.launch_seconds)
        self.streams[-1].launch(seconds)
        self.program.totals[KERNEL_SECONDS] += seconds
        self.program.totals[LAUNCHES] += 1

    def spend_host_time(self, seconds: float) -> None:
        """Let the host be busy for some time."""
        self.host_time = self.host_time.after(seconds)
        self.program.totals[HOST_SECONDS] += seconds

    def spend_call_time(self) -> None:
        """Let the host be busy with a call that launches no kernel, such as a view or an event."""
        self.spend_host_time(self.accelerator.launch_seconds / 8)  # assumed

    def new_stream(self) -> Stream:
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
        collective = RecordedCollective(tuple(ranks), start, tuple(sent), is_gather, self.num_steps)
        self.program.collectives.append(collective)
        for rank, size in zip(ranks[1:], sent[1:], strict=True):
            self.program.totals[rank] += size
        self._last[collective.ranks] = collective
        return collective

    def wait_for(self, collective: RecordedCollective) -> None:
        """Let the current stream wait for a collective; those of earlier steps have ended."""
        if collective.step == self.num_steps:
            stream = self.streams[-1]
            stream.tail = stream.tail.after_collective(collective)
