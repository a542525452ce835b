"""Tracking of runs and steps in diffusers' pipelines, and declared runs of other samplers.

A run begins when a pipeline opens its progress bar, as pipelines of diffusers do before their first step; it ends when
the bar is closed, at the latest. A step ends when the pipeline's scheduler returns, or a pass of a modular
pipeline's loop. The runs are those of the active session.
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


class RunListener(Protocol):
    """An observer of runs and steps, such as the recorder."""

    def begin_run(self, total: int | None) -> None:
        """Observe the start of a run, with its number of steps if that is known."""

    def end_step(self, latents: torch.Tensor | None) -> None:
        """Observe the end of a step, with its latents if they are known."""


class RunTracker:
    """Reports runs and steps to the active session and to listeners.

    Args:
        listeners: called in this order.
    """

    def __init__(self, listeners: Sequence[RunListener] = ()) -> None:
        self.listeners = listeners
        self._original_steps: dict[Any, Callable] = {}
        """Original `step` of each patched scheduler class."""
        self._stepping: list[Any] = []
        """Schedulers whose `step` is running."""

    def patches(self) -> list[Patch]:
        """Return the patches of diffusers' progress bars and loops."""
        module, loop = _LOOP
        of_loop = functools.partial(
            Patch, module, condition=functools.partial(symbol_lookup.find_symbol, module, f"{loop}.loop_step")
        )
        return [
            Patch(*_PIPELINE, "a run begins", self._track_bar),
            of_loop(f"{loop}.progress_bar", "a modular pipeline's run begins", self._track_bar),
            of_loop(f"{loop}.loop_step", "a modular pipeline's step ends", self._track_loop),
        ]

    def begin(self, owner: Any, total: int | None) -> Run:
        """Begin a run.

        Args:
            owner: object that ends its steps.
            total: number of steps; None where it is unknown.
        """
        for listener in self.listeners:  # before the session drops the state of the last run
            listener.begin_run(total)
        return active().begin_run(total, owner)

    def end_step(self, run: Run, latents: torch.Tensor | None = None) -> None:
        """End a step of a run; listeners observe those of the newest run only."""
        is_newest = run is active().runs.newest
        active().end_step(run)
        if is_newest:
            for listener in self.listeners:
                listener.end_step(latents)

    def close(self) -> None:
        """Restore the `step` of all scheduler classes."""
        for cls, original in self._original_steps.items():
            cls.step = original
        self._original_steps.clear()

    def _track_bar(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def progress_bar(pipeline: Any, iterable: Iterable | None = None, total: int | None = None) -> Any:
            owner = pipeline if hasattr(pipeline, "loop_step") else getattr(pipeline, "scheduler", None)
            if owner is None:
                return original(pipeline, iterable, total)
            if owner is not pipeline:
                self._patch_scheduler(type(owner))
            if iterable is None:
                # Pipelines count timesteps; a scheduler of order n steps n times at each of them.
                run = self.begin(owner, total and total * getattr(owner, "order", 1))
                return _tracked_bar(original(pipeline, total=total), run)
            run = self.begin(owner, len(iterable) if isinstance(iterable, Sized) else total)
            run.is_loop, run.is_in_step = True, False
            return original(pipeline, _TrackedIterable(iterable, run), total)

        return progress_bar

    def _track_loop(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def loop_step(blocks: Any, components: Any, state: Any, **kwargs: Any) -> Any:
            run = active().runs.run_of(blocks)
            components, state = original(blocks, components, state, **kwargs)
            if run:
                self.end_step(run, getattr(state, "latents", None))
            return components, state

        return loop_step

    def _patch_scheduler(self, cls: type) -> None:
        """Patch the `step` of a scheduler class, once."""
        # The class, and not an instance: pipelines copy their scheduler, and a copy must not end steps of the original.
        base: Any = next((base for base in cls.__mro__ if "step" in vars(base)), None)
        if base and base not in self._original_steps:
            self._original_steps[base] = base.step
            base.step = self._track_step(base.step)

    def _track_step(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if any(each is scheduler for each in self._stepping):  # called by a derived class
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


class _TrackedIterable:
    """An iterable that begins the steps of a run, and ends the run after the last one.

    It does not where a loop is left early: ranks would free the iterator at different times.
    """

    def __init__(self, iterable: Any, run: Run) -> None:
        self._iterable, self._run = iterable, run

    def __len__(self) -> int:
        return len(self._iterable)

    def __iter__(self) -> Iterator:
        for each in self._iterable:
            self._run.is_in_step = True
            yield each
        active().end_run(self._run, is_complete=True)


def _tracked_bar(bar: Any, run: Run) -> Any:
    """Let a progress bar end a run when it is closed, also where it is not displayed, as on most ranks."""
    cls: Any = type(bar)
    bar.__class__, bar.run = _class_of_tracked_bar(cls), run
    return bar


@functools.cache
def _class_of_tracked_bar(cls: Any) -> type:
    class TrackedBar(cls):
        def __exit__(self, exception: type[BaseException] | None, *more: Any) -> Any:
            active().end_run(self.run, is_complete=exception is None)
            return super().__exit__(exception, *more)

        def close(self) -> None:
            active().end_run(self.run)
            super().close()

        def __del__(self) -> None:  # ends no run: ranks may free it at different times
            super().close()

    return TrackedBar


class Sampling:
    """A declared run of a sampler without diffusers; see :func:`xfuser_cocodiff.run`.

    Args:
        tracker: reports the run; None where the plugin is not in use.
        steps: number of steps; None where it is unknown.
    """

    def __init__(self, tracker: RunTracker | None, steps: int | None) -> None:
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            raise ValueError(f"steps={steps!r}: valid are integers from 1, or None where the number is unknown")
        self._tracker, self._steps = tracker, steps
        self._run: Run | None = None
        self._open = False

    def __enter__(self) -> "Sampling":
        if self._open:
            raise RuntimeError("this run is open already; call xfuser_cocodiff.run() for each run")
        self._open = True
        if self._tracker:
            self._run = self._tracker.begin(self, self._steps)
        return self

    def __exit__(self, exception: type[BaseException] | None, *_: Any) -> None:
        self._open = False
        if self._tracker and self._run:
            active().end_run(self._run, is_complete=exception is None)
        self._run = None

    def step(self, latents: torch.Tensor | None = None) -> None:
        """End a step.

        Args:
            latents: after the step, of any shape; used by `cocodiff compare` only.

        Raises:
            RuntimeError: the call is outside of the run's `with` block.
        """
        if not self._open:
            raise RuntimeError("run.step() must be called inside of its block: `with xfuser_cocodiff.run(...) as run:`")
        if self._tracker and self._run:
            self._tracker.end_step(self._run, latents)
