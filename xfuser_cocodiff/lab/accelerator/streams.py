"""Streams and events of an emulated accelerator, with the interface of torch.Stream and torch.Event."""

from typing import Any, ClassVar, Protocol

from xfuser_cocodiff.lab.accelerator.time_line import Instant


class Host(Protocol):
    """The host of an accelerator, which queues work in its streams."""

    host_time: Instant
    """What the host has reached."""
    streams: "list[Stream]"
    """The current stream, last, and those that it has replaced."""


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

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Return an event that marks the end of everything queued so far."""
        event = event or Event()
        event.instant = self.tail.latest(self._host.host_time)
        return event

    def wait_event(self, event: "Event") -> None:
        """Queue the wait for an event."""
        self.tail = self.tail.latest(event.instant)

    def wait_stream(self, other: "Stream") -> None:
        """Queue the wait for everything that another stream holds."""
        self.tail = self.tail.latest(other.tail)

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
        self.instant = Instant()

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
