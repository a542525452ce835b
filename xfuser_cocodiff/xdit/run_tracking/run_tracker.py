"""Runs and their steps, as diffusers shows them and as samplers without it declare them.

A run begins where a pipeline opens its progress bar, which every diffusers pipeline does before its first step, and is
over when the bar is closed, at the latest. A step ends where the pipeline's scheduler returns, or a pass of a modular
pipeline's loop. Whose runs they are, the engine in force knows.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, Protocol

import torch

from xfuser_cocodiff.xdit.patching import symbol_lookup
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.session.runs import Run
from xfuser_cocodiff.xdit.session.session import active

_PIPELINE = "diffusers.pipelines.pipeline_utils", "DiffusionPipeline.progress_bar"
_LOOP = "diffusers.modular_pipelines.modular_pipeline", "LoopSequentialPipelineBlocks"


class Listener(Protocol):
    """Who wants to know, beside the engine."""

    def begin_run(self, total: int | None) -> None:
        """A run begins, of so many steps if that is known."""

    def end_step(self, latents: torch.Tensor | None) -> None:
        """A step of it has ended, in these latents if they are known."""


class RunTracker:
    """Tells the engine in force, and listeners, of runs and steps.

    Args:
        listeners: in their order.
    """

    def __init__(self, listeners: Sequence[Listener] = ()) -> None:
        self.listeners = listeners
        self._watched: dict[Any, Callable] = {}
        """Classes of schedulers, and their own `step`."""
        self._stepping: list[Any] = []
        """Schedulers whose `step` runs."""

    def patches(self) -> list[Patch]:
        """Rows that have diffusers tell."""
        rows = [Patch(*_PIPELINE, "a run begins", self._watch_bar)]
        module, loop = _LOOP
        if symbol_lookup.find_symbol(module, f"{loop}.loop_step"):
            rows.append(Patch(module, f"{loop}.progress_bar", "a modular pipeline's run begins", self._watch_bar))
            rows.append(Patch(module, f"{loop}.loop_step", "a modular pipeline's step ends", self._watch_loop))
        return rows

    def begin(self, owner: Any, total: int | None) -> Run:
        """A run begins whose steps `owner` ends."""
        for listener in self.listeners:  # while there still is what they want to know of the run before
            listener.begin_run(total)
        return active().runs.begin(total, owner)

    def end_step(self, run: Run, latents: torch.Tensor | None = None) -> None:
        """A step of a run has ended."""
        runs = active().runs
        is_newest = run is runs.newest
        runs.end_step(run)
        if is_newest:
            for listener in self.listeners:
                listener.end_step(latents)

    def end(self, run: Run) -> None:
        """A run is over, or broken off."""
        active().runs.end(run)

    def close(self) -> None:
        """Leave the classes of schedulers as they were."""
        for owner, original in self._watched.items():
            owner.step = original
        self._watched.clear()

    def _watch_bar(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def progress_bar(owner: Any, iterable: Iterable | None = None, total: int | None = None) -> Any:
            by = owner if hasattr(owner, "loop_step") else getattr(owner, "scheduler", None)
            if by is None:
                return original(owner, iterable, total)
            if by is not owner:
                self._watch_scheduler(type(by))
            if iterable is None:
                # Pipelines count timesteps, at each of which a scheduler of a higher order steps more often.
                run = self.begin(by, total and total * getattr(by, "order", 1))
                return _closing(original(owner, total=total), lambda: self.end(run))
            run = self.begin(by, len(iterable) if isinstance(iterable, Sized) else total)
            run.may_be_abandoned = True
            return original(owner, _Steps(iterable, lambda: self.end(run)), total)

        return progress_bar

    def _watch_loop(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def loop_step(blocks: Any, components: Any, state: Any, **kwargs: Any) -> Any:
            run = active().runs.run_of(blocks)
            components, state = original(blocks, components, state, **kwargs)
            if run:
                self.end_step(run, getattr(state, "latents", None))
            return components, state

        return loop_step

    def _watch_scheduler(self, cls: type) -> None:
        """Have a class of schedulers say when a step has ended."""
        # On the class: pipelines copy their scheduler, and a copy must not end steps of the one that it is a copy of.
        owner: Any = next((base for base in cls.__mro__ if "step" in vars(base)), None)
        if owner and owner not in self._watched:
            self._watched[owner] = owner.step
            owner.step = self._watch_step(owner.step)

    def _watch_step(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if any(each is scheduler for each in self._stepping):  # called by a class derived from this one
                return original(scheduler, *args, **kwargs)
            self._stepping.append(scheduler)
            try:
                output = original(scheduler, *args, **kwargs)
            finally:
                self._stepping.pop()
            if run := active().runs.run_of(scheduler):
                latents = output[0] if isinstance(output, tuple) else getattr(output, "prev_sample", output)
                self.end_step(run, latents if torch.is_tensor(latents) else None)
            return output

        return step


class _Steps:
    """What a progress bar goes over, and word when that is over.

    Nothing is said where it is left early: a rank that still holds the iterator would say so at another time.
    """

    def __init__(self, given: Any, over: Callable[[], None]) -> None:
        self._given, self._over = given, over

    def __len__(self) -> int:
        return len(self._given)

    def __iter__(self) -> Iterator:
        yield from self._given
        self._over()


def _closing(bar: Any, over: Callable[[], None]) -> Any:
    """A progress bar that says when it is closed, also where it is not displayed, as on most ranks."""
    kind: Any = type(bar)
    bar.__class__, bar.over = _closing_class(kind), over
    return bar


@functools.cache
def _closing_class(cls: Any) -> type:
    class Closing(cls):
        def close(self) -> None:
            self.over()
            super().close()

        def __del__(self) -> None:  # says nothing: ranks may clean up at different times
            super().close()

    return Closing


class Sampling:
    """A run of a sampler without diffusers; see :func:`xfuser_cocodiff.run`."""

    def __init__(self, clock: RunTracker | None, steps: int | None) -> None:
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            raise ValueError(f"steps={steps!r}: valid are whole numbers from 1, or None where it is not known")
        self._clock, self._steps = clock, steps
        self._run: Run | None = None
        self._open = False

    def __enter__(self) -> "Sampling":
        if self._open:
            raise RuntimeError("this run is open already; call xfuser_cocodiff.run() for each run")
        self._open = True
        if self._clock:
            self._run = self._clock.begin(self, self._steps)
        return self

    def __exit__(self, *_: Any) -> None:
        self._open = False
        if self._clock and self._run:
            self._clock.end(self._run)
        self._run = None

    def step(self, latents: torch.Tensor | None = None) -> None:
        """A step has ended.

        Args:
            latents: as it left them, of any shape; needed by `cocodiff compare` only.

        Raises:
            RuntimeError: not inside the `with` block of the run.
        """
        if not self._open:
            raise RuntimeError("run.step() is for the inside of its block: `with xfuser_cocodiff.run(...) as run:`")
        if self._clock and self._run:
            self._clock.end_step(self._run, latents)
