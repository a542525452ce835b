"""Autotuning of overlap schedules: whole steps of declared runs are timed by each candidate, in alternating order.

Steps are timed rather than layers: time that one layer saves may be exposed in another one.
"""

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

import torch

from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.xdit.layers.schedule_candidates import PLUGIN, ScheduleCandidates, distinct_candidates

PASSES = 4
"""Passes over all candidates. The first one allocates memory, and does not count."""
MIN_SAVING = 0.01
"""Fraction of the step time that another candidate than the plugin's schedule must save to be chosen."""

_Candidate = TypeVar("_Candidate", int, str)
_Workload = tuple[tuple[ScheduleCandidates, int], ...]
"""Candidates of the layers that ran in a step, where none is chosen yet, with the number of calls of each."""


class State(enum.Enum):
    """What a tuner does in the current step."""

    IDLE = "waits for a step with layers to tune"
    WARM = "begins a run: all ranks run by the plugin's schedule, or by one that they have agreed on"
    TIMING = "times the step, which runs by one of the candidates"
    CHOSEN = "runs by the schedules that were chosen"


class ScheduleTuner:
    """Autotunes the overlap schedules of a session. All ranks must call its methods in the same order.

    Args:
        candidates: returns the candidates of all layers so far, in an order that is the same on all ranks.
        mean: returns the mean over all ranks of each number; a collective.
        all_agree: returns whether all ranks pass the same value; a collective.
        device: device of the layers.
        on_choice: called when schedules were chosen.
    """

    def __init__(
        self,
        candidates: Callable[[], list[ScheduleCandidates]],
        mean: Callable[[list[float]], list[float]],
        all_agree: Callable[[object], bool],
        device: torch.device,
        on_choice: Callable[[], None] = lambda: None,
    ) -> None:
        self._candidates, self._mean, self._all_agree, self._on_choice = candidates, mean, all_agree, on_choice
        self._is_asynchronous = devices.capabilities(device.type).is_asynchronous
        self.state = State.IDLE
        """What it does in the current step, the same on all ranks."""
        self._workload: _Workload = ()
        """Workload of a usual step of this run: the largest one, since caches leave out layers in some steps."""
        self._seconds: dict[_Workload, list[float]] = {}
        """Step time of each complete round, in seconds, by workload."""
        self._unconfirmed: list[ScheduleCandidates] = []
        """Candidates chosen since ranks last agreed: an interrupt may have come before the choice on one of them."""
        self._start = 0.0
        """Start time of the current step, where it is timed."""

    def begin_run(self) -> None:
        """Begin a run. All ranks use PLUGIN in its first step, unless they have agreed on a choice.

        An error or an interrupt may have ended the last run after different steps on each rank, and the ranks agree on
        the complete rounds only once they have communicated. An incomplete pass is repeated.
        """
        self.state, self._workload = State.WARM, ()
        for each in self._candidates():
            each.end_step()
            each.candidate = PLUGIN
        for each in self._unconfirmed:
            each.is_held = True
        for workload, seconds in self._seconds.items():
            size = len(_indexes(workload))
            del seconds[len(seconds) // size * size :]

    def end_step(self) -> None:
        """End a step: add its time to the complete rounds, and begin the next round or choose."""
        ran = [each for each in self._candidates() if each.calls]
        if ran:
            if self.state is State.WARM:
                self._agree()
            self._end_round(ran)
        for each in self._candidates():
            each.end_step()
        if self.state is State.TIMING:
            self._start = self._now()

    def _end_round(self, ran: Sequence[ScheduleCandidates]) -> None:
        """Add the time of a usual step, and begin the next round or choose."""
        workload = tuple((each, each.calls) for each in ran if each.chosen is None)
        # A keyframe says nothing of lossy steps, neither by its time nor by its layers.
        if all(each.is_representative for each, _ in workload):
            if self.state is State.TIMING and workload == self._workload:
                self._seconds[workload].append(self._now() - self._start)
            elif _num_calls(workload) > _num_calls(self._workload):
                self._workload = workload
        if self._workload:
            self._begin_round()
        else:
            self.state = State.IDLE if workload else State.CHOSEN

    def _begin_round(self) -> None:
        """Set the candidate of the next round, or choose if all rounds are complete."""
        layers, order = [each for each, _ in self._workload], rounds(_indexes(self._workload))
        seconds = self._seconds.setdefault(self._workload, [])
        if len(seconds) < len(order):
            self.state = State.TIMING
            for each in layers:
                each.candidate = order[len(seconds)]
            return
        self._unconfirmed += layers
        index = _best(order, self._mean(seconds))
        for each in layers:
            each.choose(index)
        self.state, self._workload = State.CHOSEN, ()
        self._seconds.clear()  # other workloads may have layers with the same candidates
        self._on_choice()

    def _agree(self) -> None:
        """Drop all complete rounds and choices of this process unless all ranks have the same ones."""
        candidates = self._candidates()
        complete_rounds = sorted(
            ([(candidates.index(each), calls) for each, calls in workload], len(seconds))
            for workload, seconds in self._seconds.items()
        )
        # Of the layers that ran: values that differ between processes, such as cached choices of others, do not count.
        if not self._all_agree((complete_rounds, [each.chosen for each in candidates if each.calls])):
            self._seconds.clear()
            for each in candidates:
                each.restart()
        for each in self._unconfirmed:
            each.is_held = False
        self._unconfirmed.clear()

    def _now(self) -> float:
        """Return the time once the device is done with the step."""
        if self._is_asynchronous:
            torch.accelerator.synchronize()
        return time.perf_counter()


def rounds(indexes: Sequence[int]) -> list[int]:
    """Return the candidate of each round. A round is one step; each second pass has the reverse order, so that a drift
    of the machine's speed favors no candidate.

    Args:
        indexes: the candidates.
    """
    return [*indexes, *reversed(indexes)] * (PASSES // 2)


def choose_by_saving(savings: Mapping[_Candidate, float], usual: _Candidate) -> _Candidate:
    """Return the candidate that saves the most, if that is more than :data:`MIN_SAVING`, else the usual one.

    Args:
        savings: fraction of the usual candidate's step time that each candidate saves.
        usual: the usual candidate.
    """
    best = max(savings, key=lambda each: savings[each], default=usual)
    return best if savings.get(best, 0.0) > MIN_SAVING else usual


def _best(order: Sequence[int], seconds: Sequence[float]) -> int:
    """Return the candidate to choose, by the step time of each round, as the mean over all ranks."""
    size = len(order) // PASSES
    timed = list(zip(order, seconds, strict=True))
    passes = [dict(timed[first : first + size]) for first in range(size, len(timed), size)]
    savings = {index: median(1 - each[index] / each[PLUGIN] for each in passes) for index in passes[0]}
    return choose_by_saving(savings, PLUGIN)


def _indexes(workload: _Workload) -> list[int]:
    return distinct_candidates([each for each, _ in workload])


def _num_calls(workload: _Workload) -> int:
    return sum(calls for _, calls in workload)
