"""The runs of a session, declared or detected from calls, and the run that a call of a transformer belongs to.

The newest open run is the one that is encoded. While others are open too, its transformers must be called with the same
prompts; if steps of another run end between its calls, both are lossless from then on. While no run is declared, runs
are detected from the arguments of the calls; see :mod:`step_key`.
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
from xfuser_cocodiff.xdit.session.step_key import StepKey, UnknownStepError, prompts_of

MAX_BRANCHES = 16
"""Maximum number of calls of a transformer in one step; more of them mean that ends of steps are not detected."""
_MAX_LOSSLESS_CALLS = 2
"""Number of calls in a row without an encoded layer after which a warning follows."""
DECLARE = "wrap the loop in `with xfuser_cocodiff.run(steps=...) as run:` and call `run.step()` after each step"
_NO_STEPS = f"no denoising steps detected, since each call has a new timestep or prompt tensor; {DECLARE}"
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
    is_declared: bool = True
    """Whether the run is declared, and not detected from calls."""
    may_be_abandoned: bool = False
    """Whether the run can stop without notice; it then ends when another one begins."""
    is_disabled: bool = False
    """Whether the rest of the run is lossless, since its steps cannot be told apart."""
    prompts: dict[tuple[int, int], StepKey] = field(default_factory=dict)
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
        on_begin: called with the number of steps of a run that begins; None where it is unknown.
        on_step: called after each step of the newest run.
    """

    def __init__(
        self,
        runtime: Callable[[], CodecRuntime | None],
        reset_branches: Callable[[], None],
        all_agree: Callable[[object], bool] = lambda value: True,
        on_begin: Callable[[int | None], None] = lambda total: None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._runtime, self._reset_branches, self._all_agree = runtime, reset_branches, all_agree
        self._on_begin, self._on_step = on_begin, on_step
        self._declared: list[Run] = []
        """Open declared runs, oldest first."""
        self._detected: _DetectedRun | None = None
        """The run of the last calls, while none is declared."""
        self._current: Run | None = None
        """The run that the runtime encodes."""
        self._has_called = False
        """Whether a transformer has been called since the last step ended, while a run is declared."""
        self._inactive_reason = f"no denoising steps detected; {DECLARE}"
        self._lossless_calls = 0
        """Number of calls in a row without an encoded layer."""

    @property
    def newest(self) -> Run | None:
        """The open run that was declared last; None where all have ended."""
        return self._declared[-1] if self._declared else None

    def run_of(self, owner: Any) -> Run | None:
        """Return the open run whose steps an object ends; None where there is none."""
        return next((run for run in self._declared if run.owner is owner), None)

    def begin(self, total: int | None = None, owner: Any = None) -> Run:
        """Begin a declared run. The open run of the same owner ends, as do all that may have been abandoned.

        Args:
            total: number of steps, if it is known.
            owner: object that ends the steps.
        """
        self._declared = [run for run in self._declared if run.owner is not owner and not run.may_be_abandoned]
        self._detected, self._inactive_reason, self._lossless_calls = None, _NO_LAYER, 0
        run = Run(total or None, owner)
        self._declared.append(run)
        self._encode(run)
        self._on_begin(run.total)
        return run

    def end_step(self, run: Run | None = None) -> None:
        """End a step of an open run, and the run if that was its last step.

        Args:
            run: the newest when not given.
        """
        run = run or self.newest
        if run not in self._declared:
            return
        run.steps += 1
        if run is not self.newest and self._has_called:
            for each in self._declared:
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

    def end(self, run: Run | None = None) -> None:
        """End an open run, complete or not.

        Args:
            run: the newest when not given.
        """
        run = run or self.newest
        if run not in self._declared:
            return
        self._declared.remove(run)
        self._reset_branches()
        if run is self._current:
            self._stop_encoding()

    def clear(self) -> None:
        """End all runs."""
        self._declared.clear()
        self._detected = None
        self._stop_encoding()

    def before_call(self, root: RootModule, args: tuple, kwargs: dict[str, Any]) -> None:
        """Set the run of a transformer's next call, `root.run`; None where its layers are not encoded.

        All ranks set the same one.
        """
        runtime = self._runtime()
        if runtime is None:
            if not self._declared:  # count it as a step: schedules are tuned by the time between calls
                self._on_step()
            return
        root.run = self._declared_run(root, args, kwargs) if self._declared else self._detect_run(root, args, kwargs)
        if root.run is None and not self._declared:
            self._on_step()
        if root.run and root.calls >= MAX_BRANCHES:
            self._disable(root.run, f"no step ended in {root.calls} calls of its transformer; {DECLARE}")
        if root.run and root.run.is_disabled:
            root.run = None
        if root.run is None and self._declared:  # the warning was logged when the run was disabled
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
            if found and count > 1:
                runtime.note_branches()
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
            runtime.begin_run(run.total, run.steps, run.is_declared)

    def _stop_encoding(self) -> None:
        self._current = None
        if runtime := self._runtime():
            runtime.end_run()

    def _disable(self, run: Run, reason: str) -> None:
        """Make the rest of a run lossless."""
        if not run.is_disabled:
            self._inactive_reason, run.is_disabled = reason, True
            warn_once(f"compression inactive for the rest of the run: {reason}")
            if runtime := self._runtime():
                runtime.end_run()

    # Declared runs.

    def _declared_run(self, root: RootModule, args: tuple, kwargs: dict[str, Any]) -> Run | None:
        """Return the declared run of a call; None where it is disabled."""
        newest, self._has_called = self._declared[-1], True
        if newest.is_disabled:
            return None
        if self._current is not newest:  # a newer run has ended
            self._encode(newest)
        if len(self._declared) > 1:
            self._check_prompt(newest, root, args, kwargs, "another run is open")
        elif newest.may_be_abandoned:
            self._check_prompt(newest, root, args, kwargs, "the run may have been abandoned")
        return newest

    def _check_prompt(self, run: Run, root: RootModule, args: tuple, kwargs: dict[str, Any], doubt: str) -> None:
        """Disable a run if a call has another prompt than its first one: the call may belong to another run."""
        try:
            key = StepKey.of(root.transformer, args, kwargs)
        except UnknownStepError as error:
            return self._disable(run, f"{doubt}, and {error}")
        branch = id(root), root.calls
        is_same = run.prompts.setdefault(branch, key).has_same_prompt(key)
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

    # Detected runs.

    def _detect_run(self, root: RootModule, args: tuple, kwargs: dict[str, Any]) -> Run | None:
        """Return the run of a call while none is declared: that of the last calls, or a new one; None if unknown."""
        try:
            key = StepKey.of(root.transformer, args, kwargs)
        except UnknownStepError as error:  # the same on every rank
            self._drop_detected(str(error))
            return None
        position = self._detected.position_of(root, key) if self._detected else _NEW_RUN
        # One rank may get the same tensor where another gets a copy.
        if not self._all_agree(position):
            self._drop_detected("some ranks reuse the tensors of the last call and others make new ones")
            return None
        if position == _NEW_RUN:
            self._begin_detected_run(key)
        elif position == _NEXT_STEP:
            self._end_detected_step()
        self._detected.add_call(root, key)
        return self._current

    def _begin_detected_run(self, key: StepKey) -> None:
        self._detected = _DetectedRun(key)
        self._inactive_reason = _NO_STEPS if self._lossless_calls else _NO_LAYER
        self._encode(Run(is_declared=False))
        self._on_begin(None)

    def _end_detected_step(self) -> None:
        self._current.steps += 1
        self._reset_branches()
        self._runtime().end_step()
        self._on_step()

    def _drop_detected(self, reason: str) -> None:
        """End the detected run."""
        self._inactive_reason, self._detected = f"{reason}; {DECLARE}", None
        self._stop_encoding()

    def _warn_inactive(self, runtime: CodecRuntime) -> None:
        warn_once(f"compression inactive (mode {runtime.mode!r}): {self.reason}")


_NEW_RUN, _NEXT_STEP, _SAME_STEP = "a new run", "the next step", "the same step"
"""Positions of a call."""


class _DetectedRun:
    """A run that is detected from calls of transformers: times change in one direction, and prompts stay the same.

    Calls at the same time are branches of guidance. If time jumps back or the prompt changes, another run begins.

    Args:
        first: key of the first call.
    """

    def __init__(self, first: StepKey) -> None:
        self._last, self._direction = first, 0
        self._branches: dict[tuple[int, int], StepKey] = {}
        """Last key of each transformer (by id) and branch."""
        self._first_times: dict[int, float] = {}
        """Time of the first call of each transformer, by id."""

    def position_of(self, root: RootModule, key: StepKey) -> str:
        """Return the position of a call: in a new run, in the next step or in the same step."""
        if not self._contains(root, key):
            return _NEW_RUN
        return _NEXT_STEP if key.time != self._last.time else _SAME_STEP

    def _contains(self, root: RootModule, key: StepKey) -> bool:
        """Return whether a call certainly belongs to this run."""
        direction = self._direction_to(key)
        if key.scale != self._last.scale or (direction and self._direction not in (0, direction)):
            return False
        branch = 0 if direction else root.calls
        known = self._branches.get((id(root), branch))
        if known is None:
            # Branches are added in the first step only: later, the call may be the first one of another run.
            return branch == 0 or self._first_times[id(root)] == key.time
        return known.has_same_prompt(key)

    def _direction_to(self, key: StepKey) -> int:
        """Return the direction of time since the last call: 1, -1, or 0 at the same time."""
        return (key.time > self._last.time) - (key.time < self._last.time)

    def add_call(self, root: RootModule, key: StepKey) -> None:
        """Add a call to this run; branches must have been reset where it begins a step."""
        self._direction = self._direction_to(key) or self._direction
        self._last = key
        self._first_times.setdefault(id(root), key.time)
        self._branches[id(root), root.calls] = key
