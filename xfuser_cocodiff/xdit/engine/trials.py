"""The trial of schedules: whole steps as stock has them against steps as the plugin has them.

A step, and not a layer, since what one layer need not wait for another one may have to.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from xfuser_cocodiff.attention.schedule import OURS, STOCKS, Trial
from xfuser_cocodiff.machine import device as devices

TURNS = (OURS, STOCKS, STOCKS, OURS, OURS, STOCKS, STOCKS, OURS)
"""By what the steps of a trial run; the first pair allocates, and does not count."""
MUST_SAVE = 0.01
"""Share of a step that stock's way must save to be taken."""


class Comparison:
    """The trial of the kinds of layers that run in a step. All ranks must call its methods in the same order.

    Args:
        trials: of these kinds.
    """

    def __init__(self, trials: tuple[Trial, ...]) -> None:
        self.trials = trials
        self.seconds: list[float] = []
        """Of steps, in the order of TURNS."""
        self._calls, self._is_new_run = 0, False
        """Of layers in a usual step."""
        self._take_turn()

    @property
    def is_complete(self) -> bool:
        """Whether each turn has had its step."""
        return len(self.seconds) == len(TURNS)

    def begin_run(self) -> None:
        """Begin a run, whose steps may have another number of calls; half a pair is tried again."""
        self._is_new_run = True
        del self.seconds[len(self.seconds) // 2 * 2 :]

    @property
    def state(self) -> list[int]:
        """What turns depend on."""
        return [self._calls, len(self.seconds)]

    def took(self, seconds: float | None) -> None:
        """Count a step, unless fewer layers ran in it than in others, or they did something unusual.

        Args:
            seconds: that it took; None where it was not timed from its beginning.
        """
        calls = sum(trial.calls for trial in self.trials)
        if calls > self._calls or (self._is_new_run and calls != self._calls):
            self._calls, self.seconds = calls, []
        self._is_new_run = False
        if calls == self._calls and seconds is not None and all(trial.is_usual for trial in self.trials):
            self.seconds.append(seconds)
        self._take_turn()

    def decide(self, seconds: Sequence[float]) -> None:
        """Choose for all kinds.

        Args:
            seconds: of each turn, the mean over all ranks.
        """
        pairs = [{TURNS[place]: seconds[place] for place in (first, first + 1)} for first in range(2, len(TURNS), 2)]
        saving = median(1 - pair[STOCKS] / pair[OURS] for pair in pairs)
        for trial in self.trials:
            trial.choose(STOCKS if saving > MUST_SAVE else OURS)

    def _take_turn(self) -> None:
        if not self.is_complete:
            for trial in self.trials:
                trial.turn = TURNS[len(self.seconds)]


class Trials:
    """The trials of one engine. All ranks must call its methods in the same order.

    Args:
        trials: of the kinds of layers that there are by now, in an order that is the same on every rank.
        mean: returns the mean over all ranks of each of some numbers.
        agreed: returns whether all ranks pass the same value.
        device: where layers run.
        found: called when something was chosen.
    """

    def __init__(
        self,
        trials: Callable[[], list[Trial]],
        mean: Callable[[list[float]], list[float]],
        agreed: Callable[[object], bool],
        device: torch.device,
        found: Callable[[], None] = lambda: None,
    ) -> None:
        self._trials, self._mean, self._agreed, self._device, self._found = trials, mean, agreed, device, found
        self._is_new_run = False
        """Whether no step with a trial has ended in the run under way."""
        self._comparisons: dict[tuple[Trial, ...], Comparison] = {}
        self._began: float | None = None
        """When the step under way began, where it is timed."""

    @property
    def settled(self) -> bool:
        """Whether all kinds of layers have their schedules."""
        trials = self._trials()
        return bool(trials) and all(trial.chosen for trial in trials)

    def begin_run(self) -> None:
        """Begin a run. Its first step is not timed, and runs by OURS on every rank: an error or an interrupt may have
        ended the last run at different steps, on which the ranks agree only once they have communicated."""
        self._began, self._is_new_run = None, True
        for trial in self._trials():
            trial.end_step()
            trial.turn = OURS
        for comparison in self._comparisons.values():
            comparison.begin_run()

    def end_step(self) -> None:
        """End a step; decide where a comparison is complete."""
        ran = tuple(trial for trial in self._trials() if trial.calls and trial.chosen is None)
        queues = devices.of(self._device.type).queues
        if ran and queues:
            torch.accelerator.synchronize()
        if ran and self._is_new_run:
            self._is_new_run = False
            if not self._agreed(self._state()):
                self._comparisons.clear()
        if comparison := self._comparison(ran):
            comparison.took(None if self._began is None else time.perf_counter() - self._began)
            if comparison.is_complete:
                comparison.decide(self._mean(comparison.seconds))
                self._keep(lambda known: all(trial.chosen is None for trial in known))
                self._found()
        for trial in self._trials():
            trial.end_step()
        self._began = time.perf_counter() if ran or not queues else None

    def _comparison(self, ran: tuple[Trial, ...]) -> Comparison | None:
        """Return that of the kinds that ran in a step; None where these are a part of what is compared together, as in
        a cached step."""
        if not ran or any(set(ran) < set(known) for known in self._comparisons):
            return None
        self._keep(lambda known: not set(known) < set(ran))
        return self._comparisons.setdefault(ran, Comparison(ran))

    def _keep(self, is_open: Callable[[tuple[Trial, ...]], bool]) -> None:
        """Drop comparisons of all other kinds."""
        self._comparisons = {known: one for known, one in self._comparisons.items() if is_open(known)}

    def _state(self) -> list[list[list[int]]]:
        """What turns depend on, of all comparisons, as it is to be on every rank."""
        trials = self._trials()
        return sorted([[trials.index(trial) for trial in known], one.state] for known, one in self._comparisons.items())
