"""The trial of schedules: whole steps as stock has them against steps as the plugin has them.

A step, and not a layer, since what one layer need not wait for another one may have to.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from xfuser_cocodiff.engine.attention.overlap_schedule import PLUGIN, STOCK, ScheduleCandidates
from xfuser_cocodiff.engine.topology import devices as devices

TURNS = (PLUGIN, STOCK, STOCK, PLUGIN, PLUGIN, STOCK, STOCK, PLUGIN)
"""By what the steps of a trial run; the first pair allocates, and does not count."""
MUST_SAVE = 0.01
"""Share of a step that stock's way must save to be taken."""

_Ran = tuple[tuple[ScheduleCandidates, int], ...]
"""Trials of the kinds of layers that ran in a step, and how many of each."""


class Trials:
    """The trials of one session. All ranks must call its methods in the same order.

    Args:
        trials: of the kinds of layers that there are by now, in an order that is the same on every rank.
        mean: returns the mean over all ranks of each of some numbers.
        agreed: returns whether all ranks pass the same value.
        device: where layers run.
        found: called when something was chosen.
    """

    def __init__(
        self,
        trials: Callable[[], list[ScheduleCandidates]],
        mean: Callable[[list[float]], list[float]],
        agreed: Callable[[object], bool],
        device: torch.device,
        found: Callable[[], None] = lambda: None,
    ) -> None:
        self._trials, self._mean, self._agreed, self._device, self._found = trials, mean, agreed, device, found
        self._is_new_run = False
        """Whether no step with a trial has ended in the run under way."""
        self._usual: _Ran = ()
        """What ran in a usual step of this run: in the one with most layers. Cached steps leave some out."""
        self._others = 0
        """Steps in which something else ran since."""
        self._seconds: dict[_Ran, list[float]] = {}
        """Of steps, in the order of TURNS, by what is usual."""
        self._began: float | None = None
        """When the step under way began, where it is timed."""

    @property
    def settled(self) -> bool:
        """Whether all kinds of layers have their schedules."""
        trials = self._trials()
        return bool(trials) and all(trial.chosen for trial in trials)

    def begin_run(self) -> None:
        """Begin a run. Its first step is not timed, and runs by PLUGIN on every rank: an error or an interrupt may have
        ended the last run at different steps, on which the ranks agree only once they have communicated. Half a pair is
        tried again."""
        self._began, self._is_new_run, self._usual, self._others = None, True, (), 0
        for trial in self._trials():
            trial.end_step()
            trial.candidate = PLUGIN
        for seconds in self._seconds.values():
            del seconds[len(seconds) // 2 * 2 :]

    def end_step(self) -> None:
        """End a step; decide once every turn has had its step."""
        ran = tuple((trial, trial.calls) for trial in self._trials() if trial.calls and trial.chosen is None)
        queues = devices.capabilities(self._device.type).is_asynchronous
        is_open = bool(ran or self._usual)
        if is_open and queues:
            torch.accelerator.synchronize()
        if ran and self._is_new_run:
            self._is_new_run = False
            if not self._agreed(self._state()):
                self._seconds.clear()
        if is_open:
            self._count(ran)
        for trial in self._trials():
            trial.end_step()
        self._began = time.perf_counter() if is_open or not queues else None

    def _count(self, ran: _Ran) -> None:
        """Count a step, unless another one is usual, or its layers did something unusual."""
        if ran == self._usual:
            self._others = 0
            if self._began is not None and all(trial.is_representative for trial, _ in ran):
                self._seconds[ran].append(time.perf_counter() - self._began)
        else:
            self._others += 1
            # Where no run is declared, all that follows may be of another size.
            if sum(calls for _, calls in ran) > sum(calls for _, calls in self._usual) or self._others > len(TURNS):
                self._usual, self._others = ran, 0
        if not self._usual:
            return
        seconds = self._seconds.setdefault(self._usual, [])
        if len(seconds) < len(TURNS):
            for trial, _ in self._usual:
                trial.candidate = TURNS[len(seconds)]
        else:
            self._decide(self._mean(seconds))

    def _decide(self, seconds: Sequence[float]) -> None:
        """Choose for all kinds of a usual step.

        Args:
            seconds: of each turn, the mean over all ranks.
        """
        pairs = [{TURNS[place]: seconds[place] for place in (first, first + 1)} for first in range(2, len(TURNS), 2)]
        saving = median(1 - pair[STOCK] / pair[PLUGIN] for pair in pairs)
        for trial, _ in self._usual:
            trial.choose(STOCK if saving > MUST_SAVE else PLUGIN)
        self._usual = ()
        self._seconds.clear()  # others may have counted on a kind that is chosen now
        self._found()

    def _state(self) -> list:
        """What turns depend on, as it is to be on every rank."""
        trials = self._trials()
        return sorted(
            ([(trials.index(trial), calls) for trial, calls in ran], len(seconds))
            for ran, seconds in self._seconds.items()
        )
