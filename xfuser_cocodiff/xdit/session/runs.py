"""The runs of a session: who declares them, and which of them a call of a transformer belongs to.

The newest run that was declared and is not over is coded. While another one is open, its transformers must be given
the same prompts, and where steps of the other one end after calls, both travel exactly from there on. While none is
declared, a run is recognised from the calls themselves; see :mod:`moment`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.xdit.layers.root_module import RootModule
from xfuser_cocodiff.xdit.patching.log import warn_once
from xfuser_cocodiff.xdit.session.step_key import StepKey, UnclearError, prompts_of

MAX_BRANCHES = 16
"""Calls of a transformer in one step; more of them mean that steps are not seen."""
_IDLE_CALLS = 2
"""Calls of transformers after which something ought to have been encoded."""
DECLARE = "wrap the loop in `with xfuser_cocodiff.run(steps=...) as run:` and call `run.step()` after each step"
_ANEW = f"no denoising steps detected, since each call has a new timestep or prompt tensor; {DECLARE}"
_IN_TURNS = "it alternates with another run; finish one before the next"
_NO_LAYER = "no attention layer called xDiT's USP; other all-to-alls of a model are lossless"


@dataclass(eq=False)
class Run:
    """One call of a pipeline, or what a sampler declares as such."""

    total: int | None = None
    """Steps, if that is known."""
    owner: Any = None
    """Who ends its steps: a scheduler, a loop, or a sampler."""
    steps: int = 0
    """That have ended."""
    is_declared: bool = True
    """Whether somebody has declared it."""
    may_be_abandoned: bool = False
    """Whether nothing tells when it is broken off: then it is over when another one begins."""
    is_disabled: bool = False
    """Whether its steps were not seen, so that the rest of it travels exactly."""
    prompts: dict[tuple[int, int], StepKey] = field(default_factory=dict)
    """What they were given first in each branch, where there is a doubt whose call it is."""
    values: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    """Copies of the prompts among these, where the run may have been left."""


class Runs:
    """The runs of one session.

    Args:
        runtime: what codecs know of the run that is encoded; None where nothing is to be approximated.
        new_step: has branches counted anew.
        agreed: whether all ranks pass the same; they call it alike.
        begins: told of a run that begins, and of its steps if their number is known.
        ends_step: told of each step of the newest run, once it has ended.
    """

    def __init__(
        self,
        runtime: Callable[[], CodecRuntime | None],
        new_step: Callable[[], None],
        agreed: Callable[[object], bool] = lambda value: True,
        begins: Callable[[int | None], None] = lambda total: None,
        ends_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._runtime, self._new_step = runtime, new_step
        self._agreed, self._begins, self._ends_step = agreed, begins, ends_step
        self._declared: list[Run] = []
        """And not over; the newest comes last."""
        self._shown: _Shown | None = None
        """What calls show, while no run is declared."""
        self._current: Run | None = None
        """The one that the runtime knows."""
        self._has_called = False
        """Whether a transformer was called since the last step ended, while a run is declared."""
        self._why = f"no denoising steps detected; {DECLARE}"
        self._idle = 0
        """Calls in a row that did nothing for a mode."""

    @property
    def newest(self) -> Run | None:
        """The run that was declared last, if it is not over."""
        return self._declared[-1] if self._declared else None

    def run_of(self, owner: Any) -> Run | None:
        """The run whose steps somebody ends."""
        return next((run for run in self._declared if run.owner is owner), None)

    def begin(self, total: int | None = None, owner: Any = None) -> Run:
        """A run is declared. Another one by the same is over, and any that may have been left.

        Args:
            total: its steps, if that is known.
            by: who ends its steps.
        """
        self._declared = [run for run in self._declared if run.owner is not owner and not run.may_be_abandoned]
        self._shown, self._why, self._idle = None, _NO_LAYER, 0
        run = Run(total or None, owner)
        self._declared.append(run)
        self._code(run)
        self._begins(run.total)
        return run

    def end_step(self, run: Run | None = None) -> None:
        """A step of a run has ended; of the newest where none is given."""
        run = run or self.newest
        if run not in self._declared:
            return
        run.steps += 1
        if run is not self.newest and self._has_called:
            for each in self._declared:
                self._lose(each, _IN_TURNS)
        self._has_called = False
        self._new_step()
        runtime = self._runtime()
        over = run.steps == run.total
        if runtime and run is self._current:
            runtime.end_step()
            # Whoever moves the runtime to other steps decides when it is at the last one.
            over = over if run.is_disabled else not runtime.is_running
        if runtime and run.steps == 2 and not runtime.has_coded_layers:
            self._warn(runtime)
        if run is self.newest:
            self._ends_step()
        if over:
            self.end(run)

    def end(self, run: Run | None = None) -> None:
        """A run is over, or broken off; the newest where none is given."""
        run = run or self.newest
        if run not in self._declared:
            return
        self._declared.remove(run)
        self._new_step()
        if run is self._current:
            self._stop()

    def clear(self) -> None:
        """All of them are over."""
        self._declared.clear()
        self._shown = None
        self._stop()

    def before_call(self, root: RootModule, args: tuple, kwargs: dict[str, Any]) -> None:
        """A transformer is about to be called. All ranks find the same."""
        runtime = self._runtime()
        if runtime is None:
            if not self._declared:  # each call may as well be a step, for those who only want time to pass
                self._ends_step()
            return
        find = self._claimed if self._declared else self._recognised
        root.run = find(root, args, kwargs)
        if root.run is None and not self._declared:
            self._ends_step()
        if root.run and root.calls >= MAX_BRANCHES:
            self._lose(root.run, f"no step ended in {root.calls} calls of its transformer; {DECLARE}")
        if root.run and root.run.is_disabled:
            root.run = None
        if root.run is None and self._declared:  # which has been said
            return
        self._idle = 0 if root.run and runtime.has_coded_layers else self._idle + 1
        if self._idle > _IDLE_CALLS:
            self._warn(runtime)

    @property
    def reason(self) -> str:
        """Why nothing was encoded, where nothing was."""
        runtime = self._runtime()
        return (runtime and runtime.inactive_reason) or self._why

    def _code(self, run: Run) -> None:
        """Have the runtime know this run, from where it stands."""
        self._new_step()
        self._current = run
        if runtime := self._runtime():
            runtime.begin_run(run.total, run.steps, run.is_declared)

    def _stop(self) -> None:
        self._current = None
        if runtime := self._runtime():
            runtime.end_run()

    def _lose(self, run: Run, why: str) -> None:
        """The rest of a run travels exactly."""
        if not run.is_disabled:
            self._why, run.is_disabled = why, True
            warn_once(f"compression inactive for the rest of the run: {why}")
            if runtime := self._runtime():
                runtime.end_run()

    def _claimed(self, root: RootModule, args: tuple, kwargs: dict[str, Any]) -> Run | None:
        """The run that a call belongs to, where some are declared."""
        newest, self._has_called = self._declared[-1], True
        if newest.is_disabled:
            return None
        if self._current is not newest:  # a newer one is over
            self._code(newest)
        if len(self._declared) > 1:
            self._compare_prompts(newest, root, args, kwargs, "another run is open")
        elif newest.may_be_abandoned:
            self._compare_prompts(newest, root, args, kwargs, "the run may have been abandoned")
        return newest

    def _compare_prompts(self, run: Run, root: RootModule, args: tuple, kwargs: dict[str, Any], doubt: str) -> None:
        """Where there is a doubt whose call it is, only the prompt tells."""
        try:
            now = StepKey.of(root.transformer, args, kwargs)
        except UnclearError as error:
            return self._lose(run, f"{doubt}, and {error}")
        place = id(root), root.calls
        same = run.prompts.setdefault(place, now).same_prompt(now)
        if run.may_be_abandoned:  # a loop may make its embeddings anew at each step, of the same values
            prompt = prompts_of(root.transformer, args, kwargs)
            if place not in run.values:
                run.values[place] = [tensor.clone() for tensor in prompt]
            same = same or (
                run.prompts[place].shapes == now.shapes and all(map(torch.equal, run.values[place], prompt))
            )
        # A rank may be given the same tensor again where another one is given a copy.
        if not self._agreed(same) or not same:
            self._lose(run, f"{doubt}, and the prompt has changed")

    def _recognised(self, root: RootModule, args: tuple, kwargs: dict[str, Any]) -> Run | None:
        """The run that a call belongs to, where none is declared."""
        try:
            moment = StepKey.of(root.transformer, args, kwargs)
        except UnclearError as error:  # the same on every rank
            self._forget(str(error))
            return None
        place = self._shown.place(root, moment) if self._shown else _NEW_RUN
        # It goes by which tensors are the same, and a rank may be given the same one again where another has a copy.
        if not self._agreed(place):
            self._forget("some ranks reuse the tensors of the last call and others make new ones")
            return None
        if place == _NEW_RUN:
            self._shown, self._why = _Shown(moment), _ANEW if self._idle else _NO_LAYER
            self._code(Run(is_declared=False))
            self._begins(None)
        elif place == _NEXT_STEP:
            self._current.steps += 1
            self._new_step()
            self._runtime().end_step()
            self._ends_step()
        self._shown.take(root, moment)
        return self._current

    def _forget(self, why: str) -> None:
        """Recognise no run in the calls so far."""
        self._why, self._shown = f"{why}; {DECLARE}", None
        self._stop()

    def _warn(self, runtime: CodecRuntime) -> None:
        warn_once(f"compression inactive (mode {runtime.mode!r}): {self.reason}")


_NEW_RUN, _NEXT_STEP, _SAME_STEP = "a new run", "the next step", "the same step"


class _Shown:
    """A run as the calls of transformers show it: times that go one way, and prompts that stay.

    Calls at the same time are branches of guidance. A time that jumps back, or another prompt, is another run.

    Args:
        first: the moment of its first call.
    """

    def __init__(self, first: StepKey) -> None:
        self._last, self._direction = first, 0
        self._branches: dict[tuple[int, int], StepKey] = {}
        """The last moment of each transformer in each branch."""
        self._begins: dict[int, float] = {}
        """Time of the first call of each transformer."""

    def place(self, root: RootModule, moment: StepKey) -> str:
        """Where a call stands: in a new run, at the next step or at the same one."""
        if not self._holds(root, moment):
            return _NEW_RUN
        return _NEXT_STEP if moment.time != self._last.time else _SAME_STEP

    def _holds(self, root: RootModule, moment: StepKey) -> bool:
        """Whether a call can only be one of this run."""
        change = self._change(moment)
        if moment.scale != self._last.scale or (change and self._direction not in (0, change)):
            return False
        branch = 0 if change else root.calls
        known = self._branches.get((id(root), branch))
        if known is None:
            # A branch more than at the steps before may as well be the first call of the next run.
            return branch == 0 or self._begins[id(root)] == moment.time
        return known.same_prompt(moment)

    def _change(self, moment: StepKey) -> int:
        """Where time has gone since the last call: 1, -1, or 0 if it stands."""
        return (moment.time > self._last.time) - (moment.time < self._last.time)

    def take(self, root: RootModule, moment: StepKey) -> None:
        """Remember a call of this run, once branches are counted anew where it begins a step."""
        self._direction = self._change(moment) or self._direction
        self._last = moment
        self._begins.setdefault(id(root), moment.time)
        self._branches[id(root), root.calls] = moment
