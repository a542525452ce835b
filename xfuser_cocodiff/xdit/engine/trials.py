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
        self._take_turn()

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
        device: where layers run.
        found: called when something was chosen.
    """

    def __init__(
        self,
        trials: Callable[[], list[Trial]],
        mean: Callable[[list[float]], list[float]],
        device: torch.device,
        found: Callable[[], None] = lambda: None,
    ) -> None:
        self._trials, self._mean, self._device, self._found = trials, mean, device, found
        self._comparisons: dict[tuple[Trial, ...], Comparison] = {}
        self._began: float | None = None
        """When the step under way began, where it is timed."""

    @property
    def settled(self) -> bool:
        """Whether all kinds of layers have their schedules."""
        trials = self._trials()
        return bool(trials) and all(trial.chosen for trial in trials)

    def begin_run(self) -> None:
        """Begin a run, whose first step is not timed."""
        self._began = None
        for comparison in self._comparisons.values():
            comparison.begin_run()

    def end_step(self) -> None:
        """End a step; decide where a comparison is complete."""
        ran = tuple(trial for trial in self._trials() if trial.calls and trial.chosen is None)
        queues = devices.of(self._device.type).queues
        if ran and queues:
            torch.accelerator.synchronize()
        if comparison := self._comparison(ran):
            comparison.took(None if self._began is None else time.perf_counter() - self._began)
            if comparison.is_complete:
                comparison.decide(self._mean(comparison.seconds))
                del self._comparisons[comparison.trials]
                self._found()
        for trial in self._trials():
            trial.end_step()
        self._began = time.perf_counter() if ran or not queues else None

    def _comparison(self, ran: tuple[Trial, ...]) -> Comparison | None:
        """Return that of the kinds that ran in a step; None where these are a part of what is compared together, as in
        a cached step."""
        if ran and not any(set(ran) < set(known) for known in self._comparisons):
            self._comparisons.setdefault(ran, Comparison(ran))
        return self._comparisons.get(ran)
