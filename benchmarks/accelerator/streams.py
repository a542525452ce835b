"""Streams and events of an emulated accelerator, with the interface of torch.Stream and torch.Event.

Kernels of all streams share the device. The main stream computes; the others have a higher priority and short kernels.
So a kernel on another stream starts at once and takes its duration from the main stream, at the place in the main
stream's queue at which the host launches it. Only collectives run beside kernels.
"""

from typing import Any, ClassVar, Protocol

from benchmarks.accelerator.time_line import Instant


class Host(Protocol):
    """The host of an accelerator, which queues work in its streams."""

    host_time: Instant
    """What the host has reached."""
    streams: "list[Stream]"
    """The current stream, last, and those that it has replaced; the main stream is the first."""
    num_steps: int
    """Number of steps begun."""

    def spend_call_time(self) -> None:
        """Let the host be busy with a call that launches no kernel."""


class Stream:
    """Queue of kernels that run one after the other.

    Args:
        host: host that queues them.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.tail = Instant()
        """End of everything queued so far."""

    def launch(self, seconds: float) -> None:
        """Queue a kernel, given its duration."""
        self.tail = self.tail.latest(self._host.host_time).after(seconds)
        main = self._host.streams[0]
        if self is not main:
            main.tail = main.tail.after(seconds)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Return an event that marks the end of everything queued so far."""
        event = event or Event()
        self._host.spend_call_time()
        event.set(self.tail.latest(self._host.host_time), self._host.num_steps)
        return event

    def wait_event(self, event: "Event") -> None:
        """Queue the wait for an event."""
        self._host.spend_call_time()
        self.tail = self.tail.latest(event.instant)

    def wait_stream(self, other: "Stream") -> None:
        """Queue the wait for everything that another stream holds."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Let the host wait until everything queued so far has ended."""
        self._host.host_time = self._host.host_time.latest(self.tail)

    def query(self) -> bool:
        """Return True: nothing runs yet while a step is recorded."""
        return True

    def __enter__(self) -> "Stream":
        self._host.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._host.streams.pop()


class Event:
    """Mark in a stream. The arguments of torch.Event are accepted and ignored."""

    host: ClassVar[Host]
    """Host of this process; set while an accelerator is emulated."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._instant, self._step = Instant(), 0

    @property
    def instant(self) -> Instant:
        """When the event passes; the begin of the step if it was recorded in an earlier one, or never."""
        return self._instant if self._step == self.host.num_steps else Instant()

    def set(self, instant: Instant, step: int) -> None:
        """Set when the event passes, in the step of a number."""
        self._instant, self._step = instant, step

    def record(self, stream: Stream | None = None) -> None:
        """Mark the end of everything queued so far."""
        (stream or self.host.streams[-1]).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        """Queue the wait for this event in a stream."""
        (stream or self.host.streams[-1]).wait_event(self)

    def query(self) -> bool:
        """Return True: nothing runs yet while a step is recorded."""
        return True

    def synchronize(self) -> None:
        """Let the host wait until the event has passed."""
        self.host.host_time = self.host.host_time.latest(self.instant)

    def elapsed_time(self, later: "Event") -> float:
        """Return 0: times are known once the recorded step has run."""
        return 0.0
