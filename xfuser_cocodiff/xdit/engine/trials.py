"""Trials of an engine: of schedules in its steps and of plans between them, as far as the run has time for them.

They go on from run to run until there is nothing more to find. What decides is agreed on at the end of a step, by all
ranks that share a sequence, in one message; what they have found is kept for the next process.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from statistics import median

import torch

from xfuser_cocodiff.attention.race import Race
from xfuser_cocodiff.attention.schedule import Allowance, Trial
from xfuser_cocodiff.exchange.mesh import Mesh
from xfuser_cocodiff.machine import device as devices
from xfuser_cocodiff.machine.plan import Plan
from xfuser_cocodiff.measuring.plan_trial import EFFORTS, trial_seconds, tried
from xfuser_cocodiff.measuring.planned import Planned, plans_of

_ERROR = 1.5
"""How many times as long as it is predicted a trial of plans may take."""
_CHOICES = 3
"""Sizes of which one is tried after a step."""


class Trials:
    """What is tried in one engine. All ranks must call its methods alike.

    Args:
        planned: those whose plans are tried, and whose links are probed if they are not known yet.
        schedules: the trials of schedules that there are by now, in an order that is the same on every rank.
        mean: given numbers, the mean of all ranks for each.
        device: where messages lie.
        found: is told when something was found.
    """

    def __init__(
        self,
        planned: Sequence[Planned],
        schedules: Callable[[], list[Trial]],
        mean: Callable[[list[float]], list[float]],
        device: torch.device,
        found: Callable[[], None] = lambda: None,
    ) -> None:
        self._planned = planned
        self._schedules, self._mean, self._device, self._found = schedules, mean, device, found
        self.allowance = Allowance()
        self._clock: float | None = None
        self._step_seconds = deque[float](maxlen=64)
        """Of this run, less those of the first step, in which much is new."""
        self._races: dict[tuple[Trial, ...], Race] = {}
        """By what is to be settled in them: the kinds of layers that run in a step."""
        self._own_seconds = 0.0
        """What learning and trying have taken of this rank's time, and what has not been told to others."""
        self._steps = self._agreed_at = 0
        """Of this run; and when ranks have agreed last."""
        self._asks = True
        """Whether something was done since, or a run has begun: then they agree before they do more."""
        self._piece_seconds, self._has_probed = 0.0, False
        """The most that a piece of the probe has taken, and whether one was measured since."""

    @property
    def _open(self) -> list[Trial]:
        return [trial for trial in self._schedules() if trial.chosen is None]

    @property
    def _open_plans(self) -> list[tuple[Mesh, int]]:
        """Meshes and sizes, of which a plan may still be tried."""
        meshes = [mesh for planned in self._planned for mesh in planned.meshes]
        return [(mesh, size) for mesh in meshes for size in plans_of(mesh).open]

    @property
    def _unknown(self) -> Planned | None:
        """The first whose links are not known yet."""
        return next((planned for planned in self._planned if planned.probe), None)

    @property
    def settled(self) -> bool:
        """Whether there is nothing to find any more of the links, and of the layers and sizes that were met."""
        return bool(self._schedules()) and not (self._open or self._unknown or self._open_plans)

    def begin_run(self, total: int | None) -> None:
        """A run begins, of so many steps if that is known."""
        self.allowance.begin_run(total)
        for race in self._races.values():
            race.begin_run()
        self._step_seconds.clear()
        self._steps = self._agreed_at = 0
        self._clock, self._asks = time.perf_counter(), True

    def spend(self, seconds: float) -> None:
        """Something beside these trials has taken time for learning in this step."""
        self._own_seconds += seconds

    def end_step(self) -> None:
        """A step is over."""
        if self._clock is None:  # and nobody said when it began
            self.begin_run(None)
            return
        race, plans = self._race(), self._open_plans[:_CHOICES]
        self._take_time(self._asks and bool(race or plans or self._unknown))
        if race and self._steps > 1:
            race.took(time.perf_counter() - self._clock)
        if self._is_due(race, plans):
            estimates = self._agree(race, plans)
            if race and race.is_over:
                del self._races[race.trials]
                self._asks = True
                self._found()
            if unknown := self._unknown:
                if self.allowance.left > self._piece_seconds:
                    self._has_probed = True
                    self._do(unknown.go_on)
                    if self._unknown is not unknown:  # what was raced by now ran by other plans
                        self._races = {}
            elif not self._open:
                self._try_a_plan(plans, estimates)
        for trial in self._schedules():
            trial.end_step()
        self._clock = time.perf_counter()

    def _race(self) -> Race | None:
        """That of the kinds of layers that have run in this step, as far as they have no schedule yet; none where a
        part of them ran that are in a race already, as where the rest is cached."""
        ran = tuple(trial for trial in self._open if trial.calls)
        is_part = any(set(ran) < set(known) for known in self._races)
        if ran and ran not in self._races and not is_part:
            self._races[ran] = Race(ran)
        return self._races.get(ran)

    def _take_time(self, is_wanted: bool) -> None:
        if is_wanted and devices.of(self._device.type).queues:
            torch.accelerator.synchronize()  # the step is over when the device is at its end
        self._steps += 1
        if self._steps > 1 and (is_wanted or not devices.of(self._device.type).queues):
            self._step_seconds.append(time.perf_counter() - self._clock)

    def _is_due(self, race: Race | None, plans: list[tuple[Mesh, int]]) -> bool:
        """Whether ranks are to agree now, which takes as long as a small exchange: when something can be decided, and
        not before anybody knows how long a step takes. All of them find the same."""
        if self._steps < 2 or not (race or plans or self._unknown):
            return False
        has_time = self._steps >= 2 * self._agreed_at  # in a run of unknown length there is more and more of it
        return self._asks or bool(race and race.is_ripe) or (self.allowance.whole is None and has_time)

    def _agree(self, race: Race | None, plans: list[tuple[Mesh, int]]) -> list[list[float]]:
        """Take what steps have shown together with what other ranks have seen. What trials of plans take is agreed on
        too: Ulysses groups beside a ring know links of their own, and all must go on alike."""
        began = time.perf_counter()
        raced = race.cost_seconds if race else 0.0
        report = race.report() if race else []
        estimates = [_estimates(mesh, size) for mesh, size in plans]
        known = median(self._step_seconds or [0.0]), self._own_seconds, raced
        agreed = iter(self._mean([*known, *report, *chain(*estimates)]))
        step, own, raced = islice(agreed, len(known))
        self.allowance.learn(step, self._steps, own + raced)
        if self._has_probed:
            self._piece_seconds, self._has_probed = max(self._piece_seconds, own), False
        if race:
            race.decide(list(islice(agreed, len(report))), self.allowance.left > 0)
            race.cost_seconds = 0.0
        self._agreed_at, self._asks = self._steps, False
        self._own_seconds = time.perf_counter() - began
        return [list(islice(agreed, len(EFFORTS))) for _ in plans]

    def _try_a_plan(self, plans: list[tuple[Mesh, int]], estimates: list[list[float]]) -> None:
        """Try the first of some sizes for which there is time in this run; those for which no run has time stay by the
        planner's choice."""
        for (mesh, size), seconds in zip(plans, estimates, strict=True):
            efforts = zip(EFFORTS, seconds, strict=True)
            effort = next((effort for effort, needed in efforts if needed <= self.allowance.left), None)
            if effort:
                self._do(partial(self._try, mesh, size, effort))
                return
            if self.allowance.whole is not None and min(seconds) > self.allowance.whole:
                plans_of(mesh).leave(size)
                self._asks = True

    def _try(self, mesh: Mesh, size: int, effort: tuple[int, int]) -> None:
        plans, group = plans_of(mesh), mesh.stages.groups[Plan.flat(mesh.topology).stages[0]]
        # In the lane, where it cannot overtake an exchange that is under way.
        others, message = plans.contenders(size), plans.message(size)
        plans.settled[size] = mesh.lane.run(lambda: tried(mesh, others, message, effort, group, self._device))

    def _do(self, work: Callable[[], None]) -> None:
        """Do what finds something, and count its time."""
        began = time.perf_counter()
        work()
        self._own_seconds += time.perf_counter() - began
        self._asks = True
        self._found()


def _estimates(mesh: Mesh, size: int) -> list[float]:
    """Seconds that a trial of a size may take, by effort."""
    plans = plans_of(mesh)
    others, message = plans.contenders(size), plans.message(size)
    return [_ERROR * trial_seconds(plans.profile, others, message, effort) for effort in EFFORTS]
