"""Traffic statistics: bytes sent per axis, and on request the seconds spent in collectives; ranges for profilers."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS, HeadGroup
from xfuser_cocodiff.engine.comm.instant import Instant, now, seconds_between
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


class Traffic:
    """Bytes that this rank sent and seconds it spent in collectives, per stage: an axis, several merged axes, or flat.

    Bytes are always counted, which costs two additions. Seconds are recorded only while `timed`; on an accelerator they
    come from events in the stream that are read on demand, so that timing adds no synchronization to a step.
    """

    def __init__(self, timed: bool = False) -> None:
        self.timed = timed
        self.sent_bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._timed: list[tuple[str, Instant, Instant]] = []
        """Stages with the instants of their start and end."""

    def count_bytes(self, stage: str, ranks: int, nbytes: int) -> None:
        """Count a collective that sends `nbytes` to each of the other ranks."""
        self.sent_bytes[stage] += nbytes * (ranks - 1)
        self.calls[stage] += 1

    def time_stage(self, stage: str, device: torch.device) -> AbstractContextManager[None]:
        """Return the context manager around a collective of tensors on a device, or around its start and its wait."""
        if self.timed and not devices.is_captured(device):  # events in a captured graph have no times
            return self._time_stage(stage, device)
        return profiler_range("cocodiff", stage)

    @contextmanager
    def _time_stage(self, stage: str, device: torch.device) -> Iterator[None]:
        began = now(device)
        with profiler_range("cocodiff", stage):
            yield
        self._timed.append((stage, began, now(device)))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by stage so far; reading it waits for collectives in flight."""
        seconds: dict[str, float] = {}
        for stage, began, ended in self._timed:
            seconds[stage] = seconds.get(stage, 0.0) + seconds_between(began, ended)
        return seconds

    def reset(self) -> None:
        """Reset all statistics."""
        vars(self).update(vars(type(self)(self.timed)))


def profiler_range(*names: str) -> AbstractContextManager:
    """Return the context manager of a named range in profiler traces; it does nothing while there is no profiler."""
    return torch.autograd.profiler.record_function(".".join(names)) if is_profiling() else _NO_CONTEXT


def is_profiling() -> bool:
    """Return whether a profiler is running."""
    return torch.autograd.profiler._is_profiler_enabled
