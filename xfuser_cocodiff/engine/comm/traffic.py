"""Traffic statistics: bytes sent per axis, with a hook for a timer of collectives; ranges for profilers."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeAlias

import torch

from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS, HeadGroup

_NO_CONTEXT = nullcontext()
Timer: TypeAlias = Callable[[str, torch.device], AbstractContextManager[None]]
"""Returns the context manager that times a part of a stage, of tensors on a device."""


class Label(NamedTuple):
    """Tensors, layer and head group of an operation."""

    tensors: str
    """A letter for each tensor, as "qkv"."""
    layer: str = ""
    head_group: HeadGroup = ALL_HEADS

    def __str__(self) -> str:
        return f"communication of {self.tensors}" + (f" in {self.layer}" if self.layer else "")


class Traffic:
    """Bytes that this rank sent, per stage: an axis, several merged axes, or flat."""

    def __init__(self) -> None:
        self.sent_bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.timer: Timer | None = None
        """Timer of the collectives; None while nobody times them."""

    def count_bytes(self, stage: str, ranks: int, nbytes: int) -> None:
        """Count a collective that sends `nbytes` to each of the other ranks."""
        self.sent_bytes[stage] += nbytes * (ranks - 1)
        self.calls[stage] += 1

    def time_stage(self, stage: str, device: torch.device) -> AbstractContextManager[None]:
        """Return the context manager around a collective of tensors on a device, or around its start and its wait."""
        timer = self.timer  # read once: another thread may set it
        return timer(stage, device) if timer else profiler_range("cocodiff", stage)

    def reset(self) -> None:
        """Reset all statistics."""
        self.sent_bytes, self.calls = Counter(), Counter()


def profiler_range(*names: str) -> AbstractContextManager:
    """Return the context manager of a named range in profiler traces; it does nothing while there is no profiler."""
    return torch.autograd.profiler.record_function(".".join(names)) if is_profiling() else _NO_CONTEXT


def is_profiling() -> bool:
    """Return whether a profiler is running."""
    return torch.autograd.profiler._is_profiler_enabled
