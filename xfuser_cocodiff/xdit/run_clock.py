"""Runs and their steps, as pipelines show them: a run begins where a pipeline opens its progress bar, which every
diffusers pipeline does once, before its first step; a step ends where the pipeline's scheduler returns."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from xfuser_cocodiff.xdit.patch import Patch


class Listener(Protocol):
    """Who wants to know."""

    def begin_run(self, total: int | None) -> None:
        """A run begins, of so many steps if that is known."""

    def end_step(self, latents: torch.Tensor) -> None:
        """A step has ended in these latents."""


@dataclass
class _Run:
    scheduler: Any
    listeners: Sequence[Listener]


_under_way: list[_Run] = []
"""The last run that began."""


def patches(listeners: Sequence[Listener]) -> list[Patch]:
    """Rows that tell listeners, in their order."""

    def watch(original: Callable) -> Callable:
        @functools.wraps(original)
        def progress_bar(self: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self, "scheduler", None) is not None:
                begin(self.scheduler, kwargs.get("total"), listeners)
            return original(self, *args, **kwargs)

        return progress_bar

    site = "diffusers.pipelines.pipeline_utils", "DiffusionPipeline.progress_bar"
    return [Patch(*site, "a run begins", watch)]


def begin(scheduler: Any, total: int | None, listeners: Sequence[Listener]) -> None:
    """A run begins whose steps `scheduler` ends."""
    owner = type(scheduler)
    # On the class: pipelines copy their scheduler, and a copy must not end steps of the one that it was copied from.
    if not hasattr(owner.step, "watched"):
        owner.step = _watched(owner.step)
    _under_way[:] = [_Run(scheduler, listeners)]
    for listener in listeners:
        listener.begin_run(total)


def _watched(original: Callable) -> Callable:
    @functools.wraps(original)
    def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(scheduler, *args, **kwargs)
        for run in _under_way:
            if run.scheduler is scheduler:
                latents = output[0] if isinstance(output, tuple) else output.prev_sample
                for listener in run.listeners:
                    listener.end_step(latents)
        return output

    step.watched = True
    return step
