"""The runs of a session, and which of them the codecs encode.

Pipelines of diffusers declare their runs by a progress bar, and other samplers by :func:`xfuser_cocodiff.run`. Calls
outside of any run are lossless, since the ends of their steps are unknown. So are calls while several runs are open,
since nothing tells to which of them a call belongs.
"""

from dataclasses import dataclass
from typing import Any

from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.xdit.layers.root_module import RootModule
from xfuser_cocodiff.xdit.patching.log import warn_once

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

    @property
    def is_over(self) -> bool:
        """Whether its last step has ended."""
        return self.step == self.total


class Runs:
    """The open runs of a session, and which of them the codecs encode.

    All ranks must call its methods in the same order.

    Args:
        runtime: runtime of the codecs; None where all communication is lossless.
    """

    def __init__(self, runtime: CodecRuntime | None) -> None:
        self._runtime = runtime
        self.open: list[Run] = []
        """Open runs, oldest first."""
        self._inactive_reason = _NO_RUN
        self._undeclared_calls = 0
        """Number of calls in a row outside of any run."""

    @property
    def newest(self) -> Run | None:
        """The open run that began last; None where all have ended."""
        return self.open[-1] if self.open else None

    @property
    def only(self) -> Run | None:
        """The open run if there is a single one, which the runtime encodes; else None."""
        return self.open[0] if len(self.open) == 1 else None

    def run_of(self, owner: Any) -> Run | None:
        """Return the open run whose steps an object ends; None where there is none."""
        return next((run for run in self.open if run.owner is owner), None)

    def begin(self, run: Run) -> bool:
        """Begin a run. The open run of the same owner ends, and that of a loop, which may have been left.

        Returns:
            Whether it is the only one.
        """
        others = [other for other in self.open if other.owner is not run.owner and not other.is_loop]
        return self._set_open([*others, run])

    def end_step(self, run: Run) -> bool:
        """End a step of a run.

        Returns:
            Whether the run is the only one.
        """
        run.step, run.is_in_step = run.step + 1, not run.is_loop
        if run is not self.only:
            return False
        if self._runtime:
            self._runtime.end_step()
            if run.step == 2 and not self._runtime.has_coded_layers:
                self._warn_inactive(self.reason)
        return True

    def end(self, run: Run | None, is_complete: bool = False) -> bool:
        """End a run, complete or not; one that has ended stays so.

        Args:
            run: the run.
            is_complete: whether it is known that it was not aborted; its errors are then logged.

        Returns:
            Whether another run is the only one now, and continues.
        """
        return self._set_open([other for other in self.open if other is not run], is_complete)

    def clear(self) -> None:
        """End all runs."""
        self._set_open([])

    def before_call(self, root: RootModule) -> None:
        """Set the run of a transformer's next call, `root.run`; None where its layers are not encoded.

        All ranks set the same one.
        """
        if self.only and not self.only.is_in_step:
            self.end(self.only)
        runtime = self._runtime
        if runtime is None:
            return
        self._undeclared_calls = 0 if self.open else self._undeclared_calls + 1
        if not self.open:
            self._inactive_reason = _NO_RUN
        root.run = self.only if runtime.is_running else None
        if root.run and root.calls >= MAX_BRANCHES:
            self._inactive_reason = f"no step ended in {root.calls} calls of its transformer; {DECLARE}"
            warn_once(f"compression inactive for the rest of the run: {self._inactive_reason}")
            runtime.end_run()
            root.run = None
        if self._undeclared_calls > _MAX_UNDECLARED_CALLS:
            self._warn_inactive(_NO_RUN)

    @property
    def reason(self) -> str:
        """Reason why no layer was encoded."""
        return (self._runtime and self._runtime.inactive_reason) or self._inactive_reason

    def _set_open(self, runs: list[Run], is_complete: bool = False) -> bool:
        """Set the open runs, and let the runtime encode a single one, from its next step on.

        Args:
            runs: the runs.
            is_complete: whether the run that was encoded so far is complete.

        Returns:
            Whether another run is the only one now.
        """
        before, self.open = self.only, runs
        if len(runs) > 1:
            self._warn_inactive(_SEVERAL_RUNS)
        if (only := self.only) is before:
            return False
        if only is None:
            if self._runtime:
                self._runtime.end_run(is_complete)
            return False
        self._inactive_reason = _NO_LAYER
        if self._runtime:
            self._runtime.begin_run(only.total, only.step)
        return True

    def _warn_inactive(self, reason: str) -> None:
        self._inactive_reason = reason
        if self._runtime:
            warn_once(f"compression inactive (mode {self._runtime.mode!r}): {reason}")
