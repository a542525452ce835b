"""Accounting: what moved along which axes, and how long it took."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.topology import devices as devices

_UNTIMED = nullcontext()


class Label(NamedTuple):
    """What an exchange brings, and for which layer."""

    tensors: str
    layer: str = ""

    def __str__(self) -> str:
        return f"the exchange of {self.tensors}" + (f" in {self.layer}" if self.layer else "")


@dataclass
class Span:
    """When an exchange was under way, in seconds of the host's clock, and how long its caller was held up by it."""

    label: Label
    is_timed: bool = True
    """Whether anybody wants to know; on an accelerator the host does not see when it ends."""
    is_profiled: bool = True
    """Whether a profiler may, who does."""
    begin: float = field(default_factory=time.perf_counter)
    end: float = 0.0
    exposed_seconds: float = 0.0

    def record_transfer(self) -> AbstractContextManager[None]:
        """Around the exchange, where it runs; it may have begun before."""
        return self._record_transfer() if self.is_profiled else _UNTIMED

    @contextmanager
    def _record_transfer(self) -> Iterator[None]:
        with torch.autograd.profiler.record_function(f"cocodiff.{self.label.tensors}.exchange"):
            yield
        self.end = time.perf_counter()

    def record_wait(self) -> AbstractContextManager[None]:
        """Around the wait for it, where the caller is."""
        return self._record_wait() if self.is_profiled else _UNTIMED

    @contextmanager
    def _record_wait(self) -> Iterator[None]:
        started = time.perf_counter()
        with torch.autograd.profiler.record_function(f"cocodiff.{self.label.tensors}.wait"):
            yield
        self.exposed_seconds = time.perf_counter() - started


_UNSEEN = Span(Label(""), is_timed=False, is_profiled=False)


class Traffic:
    """Bytes that this rank sent and seconds it spent in collectives, per stage: an axis, several merged ones, or flat.

    Bytes are always counted: that is two additions. Seconds are taken only while `timed`; on an accelerator they come
    from events in the stream, which are read when asked for, so that timing adds no synchronisation to a step.
    """

    def __init__(self, timed: bool = False) -> None:
        self.timed = timed
        self.sent_bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.spans: list[Span] = []
        """Of each exchange, in the order of their starts, while `timed` and on a CPU."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._pending: list[tuple[str, torch.Event, torch.Event]] = []

    def count(self, stage: str, ranks: int, buffer: torch.Tensor) -> None:
        """Count an all-to-all of `buffer` among so many ranks."""
        self.count_bytes(stage, ranks, buffer.nbytes // ranks)

    def count_bytes(self, stage: str, ranks: int, nbytes: int) -> None:
        """Count so many bytes that go to each of the other ranks."""
        self.sent_bytes[stage] += nbytes * (ranks - 1)
        self.calls[stage] += 1

    def span(self, label: Label, device: torch.device) -> Span:
        """Take the times of an exchange."""
        if devices.capabilities(device.type).is_asynchronous:
            return Span(label, is_timed=False) if _profiled() else _UNSEEN
        if not (self.timed or _profiled()):
            return _UNSEEN
        span = Span(label)
        if self.timed:
            self.spans.append(span)
        return span

    @property
    def hidden_seconds(self) -> float:
        """Seconds of hidden communication, over all layers."""
        return sum(hidden for _, hidden in self.hidden_by_layer().values())

    def hidden_by_layer(self) -> dict[str, tuple[float, float]]:
        """Return for each layer the seconds in which exchanges were in flight, however many at once, and those of them
        that were hidden: in which the caller did not wait. The rest is exposed."""
        found: dict[str, tuple[float, float]] = {}
        for layer in dict.fromkeys(span.label.layer for span in self.spans):
            spans = [span for span in self.spans if span.label.layer == layer]
            seconds, until = 0.0, 0.0
            for begin, end in sorted((span.begin, span.end) for span in spans):
                seconds += max(0.0, end - max(begin, until))
                until = max(until, end)
            found[layer] = seconds, max(0.0, seconds - sum(span.exposed_seconds for span in spans))
        return found

    def time_stage(self, stage: str, device: torch.device) -> AbstractContextManager[None]:
        """Take the time of a collective on the host, around its start and around its wait."""
        return self._time_stage(stage, device) if self.timed or _profiled() else _UNTIMED

    @contextmanager
    def _time_stage(self, stage: str, device: torch.device) -> Iterator[None]:
        with torch.autograd.profiler.record_function(f"cocodiff.{stage}"):
            started = time.perf_counter()
            yield
            if self.timed and not devices.capabilities(device.type).is_asynchronous:
                self._seconds[stage] += time.perf_counter() - started

    def record_start(self, device: torch.device) -> torch.Event | None:
        """Mark that a collective may begin on an accelerator, in the stream that waits for it in the end; None where
        nobody wants to know when."""
        if not (self.timed and devices.capabilities(device.type).is_asynchronous):
            return None
        event = torch.Event(device.type, enable_timing=True)
        event.record()
        return event

    def record_end(self, stage: str, began: torch.Event | None) -> None:
        """Mark that a collective has ended which was marked when it began. So its time is all of it, as that of a
        collective that nothing overlaps, however long its caller computed meanwhile."""
        if began is not None:
            end = torch.Event(began.device.type, enable_timing=True)
            end.record()
            self._pending.append((stage, began, end))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per stage so far; waits for collectives that are still under way."""
        for stage, start, end in self._pending:
            end.synchronize()
            self._seconds[stage] += start.elapsed_time(end) / 1000
        self._pending.clear()
        return dict(self._seconds)

    def reset(self) -> None:
        """Forget everything counted."""
        vars(self).update(vars(type(self)(self.timed)))


def _profiled() -> bool:
    return torch.autograd.profiler._is_profiler_enabled
