"""The time that this rank spends in the collectives of each stage."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from xfuser_cocodiff.engine.comm.traffic import profiler_range
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.tools.comparison.instant import Instant, now, seconds_between


class StageTimer:
    """Timer of collectives, for :attr:`xfuser_cocodiff.engine.comm.traffic.Traffic.timer`.

    On an accelerator times come from events in the stream that are read on demand, so that timing adds no
    synchronization to a step.
    """

    def __init__(self) -> None:
        self._timed: list[tuple[str, Instant, Instant]] = []
        """Stages with the instants of their start and end."""

    @contextmanager
    def __call__(self, stage: str, device: torch.device) -> Iterator[None]:
        """Time a part of a stage, unless a graph is being captured, in which events have no times."""
        began = None if devices.is_captured(device) else now(device)
        with profiler_range("cocodiff", stage):
            yield
        if began is not None:
            self._timed.append((stage, began, now(device)))

    def seconds(self) -> dict[str, float]:
        """Return the seconds by stage so far; waits for collectives in flight."""
        seconds: dict[str, float] = {}
        for stage, began, ended in self._timed:
            seconds[stage] = seconds.get(stage, 0.0) + seconds_between(began, ended)
        return seconds
