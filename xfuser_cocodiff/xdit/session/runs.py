"""The runs of a session, and the run that a call of a transformer belongs to.

Pipelines of diffusers declare their runs by a progress bar, and other samplers by :func:`xfuser_cocodiff.run`. Calls
outside of any run are lossless, since the ends of their steps are unknown.

The newest open run is the one that is encoded. While others are open too, its transformers must be called with the same
prompts; if steps of another run end between its calls, both are lossless from then on.
"""

import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.xdit.layers.root_module import RootModule
from xfuser_cocodiff.xdit.patching.log import warn_once
from xfuser_cocodiff.xdit.platforms.platform import is_captured
from xfuser_cocodiff.xdit.session import batched_branches
from xfuser_cocodiff.xdit.session.batched_branches import BatchedBranches
from xfuser_cocodiff.xdit.session.prompt_key import PROMPTS, PromptKey, prompts_of

MAX_BRANCHES = 16
"""Maximum number of calls of a transformer in one step; more of them mean that ends of steps are not detected."""
_MAX_LOSSLESS_CALLS = 2
"""Number of calls in a row without an encoded layer after which a warning follows."""
DECLARE = "wrap the loop in `with xfuser_cocodiff.run(steps=...) as run:` and call `run.step()` after each step"
_NO_RUN = f"no denoising steps detected; {DECLARE}"
_ALTERNATES = "it alternates with another run; finish one before the next"
_NO_LAYER = "no attention layer called xDiT's USP; other all-to-alls of a model are lossless"


@dataclass(eq=False)
class Run:
    """One call of a pipeline, or a run that a sampler declares."""

    total: int | None = None
    """Number of steps; None where it is unknown."""
    owner: Any = None
    """Object that ends the steps: a scheduler, a loop or a sampler."""
    steps: int = 0
    """Number of steps that have ended."""
    may_be_abandoned: bool = False
    """Whether the run can stop without notice; it then ends when another one begins."""
    is_disabled: bool = False
    """Whether the rest of the run is lossless, since its steps cannot be told apart."""
    prompts: dict[tuple[int, int], PromptKey] = field(default_factory=dict)
    """First key of each transformer (by id) and branch, recorded while only the prompt identifies a call's run."""
    batched_branches: MutableMapping[RootModule, dict[int, BatchedBranches]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """Branches in the batch of each transformer, by batch size. Not by id: a rank may use one again, another not."""
    prompt_values: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    """Copies of the prompts in :attr:`prompts`, for a run that may be abandoned."""


class Runs:
    """The runs of a session. All ranks must call its methods in the same order.

    Args:
        runtime: returns the runtime of the codecs; None where all communication is lossless.
        reset_branches: counts the branches of all transformers from zero.
        all_agree: returns whether all ranks pass the same value; a collective.
        on_begin: called when a run begins.
        on_step: called after each step of the newest run.
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
        self._current: Run | None = None
        """The run that the runtime encodes."""
        self._has_called = False
        """Whether a transformer has been called in a run since the last step ended."""
        self._inactive_reason = _NO_RUN
        self._lossless_calls = 0
        """Number of calls in a row without an encoded layer."""

    @property
    def newest(self) -> Run | None:
        """The open run that began last; None where all have ended."""
        return self._open[-1] if self._open else None

    def run_of(self, owner: Any) -> Run | None:
        """Return the open run whose steps an object ends; None where there is none."""
        return next((run for run in self._open if run.owner is owner), None)

    def begin(self, total: int | None = None, owner: Any = None) -> Run:
        """Begin a run. The open run of the same owner ends, as do all that may have been abandoned.

        Args:
            total: number of steps, if it is known.
            owner: object that ends the steps.
        """
        self._open = [run for run in self._open if run.owner is not owner and not run.may_be_abandoned]
        self._inactive_reason, self._lossless_calls = _NO_LAYER, 0
        run = Run(total or None, owner)
        self._open.append(run)
        self._encode(run)
        self._on_begin()
        return run

    def end_step(self, run: Run | None = None) -> None:
        """End a step of an open run, and the run if that was its last step.

        Args:
            run: the newest when not given.
        """
        run = run or self.newest
        if run not in self._open:
            return
        run.steps += 1
        if run is not self.newest and self._has_called:
            for each in self._open:
                self._disable(each, _ALTERNATES)
        self._has_called = False
        self._reset_branches()
        is_over = self._end_runtime_step(run)
        if run is self.newest:
            self._on_step()
        if is_over:
            self.end(run)

    def _end_runtime_step(self, run: Run) -> bool:
        """End a step in the runtime if it encodes this run, and return whether the run is over."""
        runtime = self._runtime()
        is_over = run.steps == run.total
        if runtime and run is self._current:
            runtime.end_step()
            # Only the runtime knows the last step where it has been set to another one.
            is_over = is_over if run.is_disabled else not runtime.is_running
        if runtime and run.steps == 2 and not runtime.has_coded_layers:
            self._warn_inactive(runtime)
        return is_over

    def end(self, run: Run | None = None, is_complete: bool = False) -> None:
        """End an open run, complete or not.

        Args:
            run: the newest when not given.
            is_complete: whether it is known that it was not aborted; its errors are then logged.
        """
        run = run or self.newest
        if run not in self._open:
            return
        self._open.remove(run)
        self._reset_branches()
        if run is self._current:
            self._stop_encoding(is_complete)

    def clear(self) -> None:
        """End all runs."""
        self._open.clear()
        self._stop_encoding()

    def before_call(self, root: RootModule, args: tuple, kwargs: dict[str, Any]) -> None:
        """Set the run of a transformer's next call, `root.run`; None where its layers are not encoded.

        All ranks set the same one.
        """
        runtime = self._runtime()
        if not self._open:
            self._inactive_reason = _NO_RUN
            self._on_step()  # schedules are tuned by the time between calls
        if runtime is None:
            return
        root.run = self._run_of_call(root, args, kwargs) if self._open else None
        if root.run and root.calls >= MAX_BRANCHES:
            self._disable(root.run, f"no step ended in {root.calls} calls of its transformer; {DECLARE}")
        if root.run and root.run.is_disabled:
            root.run = None
        if root.run is None and self._open:  # the warning was logged when the run was disabled
            return
        root.batched_branches = self._batched_branches(runtime, root, args, kwargs) if root.run else 1
        self._lossless_calls = 0 if root.run and runtime.has_coded_layers else self._lossless_calls + 1
        if self._lossless_calls > _MAX_LOSSLESS_CALLS:
            self._warn_inactive(runtime)

    def _batched_branches(self, runtime: CodecRuntime, root: RootModule, args: tuple, kwargs: dict[str, Any]) -> int:
        """Return the number of branches in the batch of a call, if branches are coded together.

        It is found at the first call of a run with each batch size, and confirmed in a later step. A rank may hold a
        part of the latents.
        """
        latents = batched_branches.latents_of(root, args, kwargs) if runtime.schedule.joint else None
        if latents is None or len(latents) == 1 or is_captured():  # where the host cannot wait for the device
            return 1
        run, known = root.run, root.run.batched_branches.setdefault(root, {})
        found = known.get(len(latents))
        if found is None or (found.is_doubtful and found.step < run.steps):
            count = batched_branches.count_branches(latents)
            if not self._all_agree(count) or (found and count != found.count):
                count = 1
            known[len(latents)] = found = BatchedBranches(count, run.steps, is_doubtful=not found and count > 1)
        return found.count

    @property
    def reason(self) -> str:
        """Reason why no layer was encoded."""
        runtime = self._runtime()
        return (runtime and runtime.inactive_reason) or self._inactive_reason

    def _encode(self, run: Run) -> None:
        """Let the runtime encode a run, from its next step on."""
        self._reset_branches()
        self._current = run
        if runtime := self._runtime():
            runtime.begin_run(run.total, run.steps)

    def _stop_encoding(self, is_complete: bool = False) -> None:
        self._current = None
        if runtime := self._runtime():
            runtime.end_run(is_complete)

    def _disable(self, run: Run, reason: str) -> None:
        """Make the rest of a run lossless."""
        if not run.is_disabled:
            self._inactive_reason, run.is_disabled = reason, True
            warn_once(f"compression inactive for the rest of the run: {reason}")
            if runtime := self._runtime():
                runtime.end_run()

    def _run_of_call(self, root: RootModule, args: tuple, kwargs: dict[str, Any]) -> Run | None:
        """Return the newest open run, to which a call belongs; None where it is disabled."""
        newest, self._has_called = self._open[-1], True
        if newest.is_disabled:
            return None
        if self._current is not newest:  # a newer run has ended
            self._encode(newest)
        if len(self._open) > 1:
            self._check_prompt(newest, root, args, kwargs, "another run is open")
        elif newest.may_be_abandoned:
            self._check_prompt(newest, root, args, kwargs, "the run may have been abandoned")
        return newest

    def _check_prompt(self, run: Run, root: RootModule, args: tuple, kwargs: dict[str, Any], doubt: str) -> None:
        """Disable a run if a call has another prompt than its first one: the call may belong to another run."""
        key = PromptKey.of(root.transformer, args, kwargs)
        if not key.tensors:
            return self._disable(run, f"{doubt}, and its transformer is given no argument named {', '.join(PROMPTS)}")
        branch = id(root), root.calls
        is_same = run.prompts.setdefault(branch, key).is_same(key)
        if run.may_be_abandoned:  # a loop may compute equal embeddings again in each step
            prompt = prompts_of(root.transformer, args, kwargs)
            if branch not in run.prompt_values:
                run.prompt_values[branch] = [tensor.clone() for tensor in prompt]
            is_same = is_same or (
                run.prompts[branch].shapes == key.shapes and all(map(torch.equal, run.prompt_values[branch], prompt))
            )
        # One rank may get the same tensor where another gets a copy.
        if not self._all_agree(is_same) or not is_same:
            self._disable(run, f"{doubt}, and the prompt has changed")

    def _warn_inactive(self, runtime: CodecRuntime) -> None:
        warn_once(f"compression inactive (mode {runtime.mode!r}): {self.reason}")
