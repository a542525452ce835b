"""Traffic statistics: bytes sent and seconds spent per axis, and how much communication was hidden."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS, HeadGroup
from xfuser_cocodiff.engine.topology import devices

_NO_CONTEXT = nullcontext()


class Label(NamedTuple):
    """Tensors, layer and head group of an operation."""

    tensors: str
    """A letter for each tensor, as "qkv"."""
    layer: str = ""
    head_group: HeadGroup = ALL_HEADS

    def __str__(self) -> str:
        return f"communication of {self.tensors}" + (f" in {self.layer}" if self.layer else "")


@dataclass
class Span:
    """Start and end of an operation, in seconds of the host's clock, and the time for which its caller was blocked."""

    label: Label
    is_timed: bool = True
    """Whether the times are recorded; on an accelerator the host does not see when an operation ends."""
    is_profiled: bool = True
    """Whether the operation appears as a range in profiler traces."""
    begin: float = field(default_factory=time.perf_counter)
    end: float = 0.0
    exposed_seconds: float = 0.0
    """Time that the caller waited for the operation."""

    def record_transfer(self) -> AbstractContextManager[None]:
        """Return the context manager around the operation itself, which may have begun before."""
        return self._record_transfer() if self.is_profiled else _NO_CONTEXT

    @contextmanager
    def _record_transfer(self) -> Iterator[None]:
        with torch.autograd.profiler.record_function(f"cocodiff.{self.label.tensors}.exchange"):
            yield
        self.end = time.perf_counter()

    def record_wait(self) -> AbstractContextManager[None]:
        """Return the context manager around the caller's wait."""
        return self._record_wait() if self.is_profiled else _NO_CONTEXT

    @contextmanager
    def _record_wait(self) -> Iterator[None]:
        started = time.perf_counter()
        with torch.autograd.profiler.record_function(f"cocodiff.{self.label.tensors}.wait"):
            yield
        self.exposed_seconds = time.perf_counter() - started


_UNRECORDED = Span(Label(""), is_timed=False, is_profiled=False)


class Traffic:
    """Bytes that this rank sent and seconds it spent in collectives, per stage: an axis, several merged axes, or flat.

    Bytes are always counted, which costs two additions. Seconds are recorded only while `timed`; on an accelerator they
    come from events in the stream that are read on demand, so that timing adds no synchronization to a step.
    """

    def __init__(self, timed: bool = False) -> None:
        self.timed = timed
        self.sent_bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.spans: list[Span] = []
        """Operations in the order of their starts; recorded while `timed`, on CPUs only."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._pending: list[tuple[str, torch.Event, torch.Event]] = []

    def count(self, stage: str, ranks: int, buffer: torch.Tensor) -> None:
        """Count an all-to-all of `buffer` among a number of ranks."""
        self.count_bytes(stage, ranks, buffer.nbytes // ranks)

    def count_bytes(self, stage: str, ranks: int, nbytes: int) -> None:
        """Count a collective that sends `nbytes` to each of the other ranks."""
        self.sent_bytes[stage] += nbytes * (ranks - 1)
        self.calls[stage] += 1

    def span(self, label: Label, device: torch.device) -> Span:
        """Return the span of an operation that starts now."""
        if devices.capabilities(device.type).is_asynchronous:
            return Span(label, is_timed=False) if _is_profiling() else _UNRECORDED
        if not (self.timed or _is_profiling()):
            return _UNRECORDED
        span = Span(label)
        if self.timed:
            self.spans.append(span)
        return span

    @property
    def hidden_seconds(self) -> float:
        """Seconds of hidden communication, over all layers."""
        return sum(hidden for _, hidden in self.hidden_by_layer().values())

    def hidden_by_layer(self) -> dict[str, tuple[float, float]]:
        """Return the seconds of communication and of hidden communication, by layer.

        Communication is the time during which at least one operation was in flight. It is exposed while the caller
        waits, and hidden otherwise.
        """
        by_layer: dict[str, tuple[float, float]] = {}
        for layer in dict.fromkeys(span.label.layer for span in self.spans):
            spans = [span for span in self.spans if span.label.layer == layer]
            seconds, until = 0.0, 0.0
            for begin, end in sorted((span.begin, span.end) for span in spans):
                seconds += max(0.0, end - max(begin, until))
                until = max(until, end)
            by_layer[layer] = seconds, max(0.0, seconds - sum(span.exposed_seconds for span in spans))
        return by_layer

    def time_stage(self, stage: str, device: torch.device) -> AbstractContextManager[None]:
        """Return the context manager that times a collective on the host; used around its start and around its wait."""
        return self._time_stage(stage, device) if self.timed or _is_profiling() else _NO_CONTEXT

    @contextmanager
    def _time_stage(self, stage: str, device: torch.device) -> Iterator[None]:
        with torch.autograd.profiler.record_function(f"cocodiff.{stage}"):
            started = time.perf_counter()
            yield
            if self.timed and not devices.capabilities(device.type).is_asynchronous:
                self._seconds[stage] += time.perf_counter() - started

    def record_start(self, device: torch.device) -> torch.Event | None:
        """Record the start of a collective in the accelerator stream that will wait for it.

        Returns:
            The event; None if the collective is not timed, as in the capture of a graph: events in it have no times.
        """
        if not (self.timed and devices.capabilities(device.type).is_asynchronous) or devices.is_captured(device):
            return None
        event = torch.Event(device.type, enable_timing=True)
        event.record()
        return event

    def record_end(self, stage: str, start: torch.Event | None) -> None:
        """Record the end of a collective whose start was recorded.

        Its time is the whole duration, as if nothing overlapped with it, however long its caller computed meanwhile.
        """
        if start is not None:
            end = torch.Event(start.device.type, enable_timing=True)
            end.record()
            self._pending.append((stage, start, end))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by stage so far; reading it waits for collectives in flight."""
        for stage, start, end in self._pending:
            end.synchronize()
            self._seconds[stage] += start.elapsed_time(end) / 1000
        self._pending.clear()
        return dict(self._seconds)

    def reset(self) -> None:
        """Reset all statistics."""
        vars(self).update(vars(type(self)(self.timed)))


def _is_profiling() -> bool:
    return torch.autograd.profiler._is_profiler_enabled
