"""The runs of a session, and which of them the codecs encode.

Pipelines of diffusers declare their runs by a progress bar, and other samplers by :func:`xfuser_cocodiff.run`. Calls
outside of any run are lossless, since the ends of their steps are unknown. So are calls while several runs are open,
since nothing tells to which of them a call belongs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.xdit.layers.root_module import RootModule
from xfuser_cocodiff.xdit.patching.log import warn_once
from xfuser_cocodiff.xdit.session.batched_branches import BatchedBranches

MAX_BRANCHES = 16
"""Maximum number of calls of a transformer in one step; more of them mean that ends of steps are not detected."""
_MAX_UNDECLARED_CALLS = 2
"""Number of calls in a row outside of any run after which a warning follows."""
DECLARE = "wrap the loop in `with xfuser_cocodiff.run(steps=...) as run:` and call `run.step()` after each step"
_NO_RUN = f"no denoising steps detected; {DECLARE}"
_SEVERAL_RUNS = "several runs are open; finish one before the next, and declare none around a pipeline of diffusers"
_NO_LAYER = "no attention layer called xDiT's USP; other all-to-alls of a model are lossless"


@dataclass(eq=False)
class Run:
    """One call of a pipeline, or a run that a sampler declares."""

    total: int | None = None
    """Number of steps; None where it is unknown."""
    owner: Any = None
    """Object that ends the steps: a scheduler, a loop or a sampler."""
    step: int = 0
    """Number of steps that have ended."""
    is_loop: bool = False
    """Whether a loop over an iterable declares it, which may be left early without notice."""
    is_in_step: bool = True
    """Whether calls belong to it; between two steps of a loop they do not, since it has been left then."""
    batched_branches: BatchedBranches = field(default_factory=BatchedBranches)
    """Branches in the batches of its calls."""


class Runs:
    """The runs of a session. All ranks must call its methods in the same order.

    Args:
        runtime: returns the runtime of the codecs; None where all communication is lossless.
        reset_branches: counts the branches of all transformers from zero.
        all_agree: returns whether all ranks pass the same value; a collective.
        on_begin: called when a run begins, and when it is the only one again.
        on_step: called after each step of the only run.
    """

    def __init__(
        self,
        runtime: Callable[[], CodecRuntime | None],
        reset_branches: Callable[[], None],
        all_agree: Callable[[object], bool] = lambda value: True,
        on_begin: Callable[[], None] = lambda: None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._runtime, self._reset_branches, self._all_agree = runtime, reset_branches, all_agree
        self._on_begin, self._on_step = on_begin, on_step
        self._open: list[Run] = []
        """Open runs, oldest first."""
        self._only: Run | None = None
        """The open run if there is a single one, which the runtime encodes."""
        self._inactive_reason = _NO_RUN
        self._undeclared_calls = 0
        """Number of calls in a row outside of any run."""

    @property
    def newest(self) -> Run | None:
        """The open run that began last; None where all have ended."""
        return self._open[-1] if self._open else None

    def run_of(self, owner: Any) -> Run | None:
        """Return the open run whose steps an object ends; None where there is none."""
        return next((run for run in self._open if run.owner is owner), None)

    def begin(self, total: int | None = None, owner: Any = None) -> Run:
        """Begin a run. The open run of the same owner ends, and that of a loop, which may have been left.

        Args:
            total: number of steps, if it is known.
            owner: object that ends the steps.
        """
        self._open = [run for run in self._open if run.owner is not owner and not run.is_loop]
        self._open.append(run := Run(total or None, owner))
        self._encode_only_run()
        return run

    def end_step(self, run: Run | None = None) -> None:
        """End a step of an open run, and the run if that was its last step.

        Args:
            run: the newest when not given.
        """
        run = run or self.newest
        if run not in self._open:
            return
        run.step, run.is_in_step = run.step + 1, not run.is_loop
        self._reset_branches()
        if run is self._only:
            if runtime := self._runtime():
                runtime.end_step()
                if run.step == 2 and not runtime.has_coded_layers:
                    self._warn_inactive(runtime)
            self._on_step()
        if run.step == run.total:
            self.end(run, is_complete=True)

    def end(self, run: Run | None = None, is_complete: bool = False) -> None:
        """End an open run, complete or not.

        Args:
            run: the newest when not given.
            is_complete: whether it is known that it was not aborted; its errors are then logged.
        """
        run = run or self.newest
        if run in self._open:
            self._open.remove(run)
            self._encode_only_run(is_complete)

    def clear(self) -> None:
        """End all runs."""
        self._open.clear()
        self._encode_only_run()

    def before_call(self, root: RootModule, args: tuple, kwargs: dict[str, Any]) -> None:
        """Set the run of a transformer's next call, `root.run`; None where its layers are not encoded.

        All ranks set the same one.
        """
        if self._only and not self._only.is_in_step:
            self.end(self._only)
        runtime = self._runtime()
        self._undeclared_calls = 0 if self._open else self._undeclared_calls + 1
        if not self._open:
            self._inactive_reason = _NO_RUN
        if runtime is None:
            return
        root.run = self._only if runtime.is_running else None
        if root.run and root.calls >= MAX_BRANCHES:
            self._inactive_reason = f"no step ended in {root.calls} calls of its transformer; {DECLARE}"
            warn_once(f"compression inactive for the rest of the run: {self._inactive_reason}")
            runtime.end_run()
            root.run = None
        counts = root.run and runtime.schedule.joint
        root.batched_branches = (
            root.run.batched_branches.count(root, args, kwargs, root.run.step, self._all_agree) if counts else 1
        )
        if self._undeclared_calls > _MAX_UNDECLARED_CALLS:
            self._warn_inactive(runtime)

    @property
    def reason(self) -> str:
        """Reason why no layer was encoded."""
        runtime = self._runtime()
        return (runtime and runtime.inactive_reason) or self._inactive_reason

    def _encode_only_run(self, is_complete: bool = False) -> None:
        """Let the runtime encode the open run if there is a single one, from its next step on.

        Args:
            is_complete: whether the run that it encodes now is complete.
        """
        only, runtime = self._open[0] if len(self._open) == 1 else None, self._runtime()
        if len(self._open) > 1:
            self._inactive_reason = _SEVERAL_RUNS
            if runtime:
                warn_once(f"compression inactive (mode {runtime.mode!r}): {_SEVERAL_RUNS}")
        if only is self._only:
            return
        self._only = only
        self._reset_branches()
        if only is None:
            if runtime:
                runtime.end_run(is_complete)
            return
        self._inactive_reason = _NO_LAYER
        if runtime:
            runtime.begin_run(only.total, only.step)
        self._on_begin()

    def _warn_inactive(self, runtime: CodecRuntime) -> None:
        warn_once(f"compression inactive (mode {runtime.mode!r}): {self.reason}")
