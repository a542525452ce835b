"""Autotuning by whole steps: several candidates are timed in alternating steps.

Steps are timed rather than layers: time that one layer saves may be exposed in another one.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from xfuser_cocodiff.engine.attention.overlap_schedule import PLUGIN, Candidates, distinct_candidates
from xfuser_cocodiff.engine.topology import devices

PASSES = 4
"""Passes over all candidates. The first one allocates memory, and does not count."""

_Workload = tuple[tuple[Candidates[Any], int], ...]
"""Candidates of the layers that ran in a step, where none is chosen yet, with the number of calls of each."""


class StepTuner:
    """Tuner that times whole steps by several candidates; subclasses choose.

    All ranks must call its methods in the same order.

    Args:
        candidates: returns the candidates of all layers so far, in an order that is the same on all ranks.
        mean: returns the mean over all ranks of each number; a collective.
        all_agree: returns whether all ranks pass the same value; a collective.
        device: device of the layers.
    """

    def __init__(
        self,
        candidates: Callable[[], Sequence[Candidates[Any]]],
        mean: Callable[[list[float]], list[float]],
        all_agree: Callable[[object], bool],
        device: torch.device,
    ) -> None:
        self._candidates, self._mean, self._all_agree = candidates, mean, all_agree
        self._is_asynchronous = devices.capabilities(device.type).is_asynchronous
        self._is_new_run = False
        """Whether no step with candidates has ended since the run began."""
        self._unconfirmed: list[Candidates[Any]] = []
        """Candidates chosen since ranks last agreed: an interrupt may have come before the choice on one of them."""
        self._workload: _Workload = ()
        """Workload of a usual step of this run: the largest one, since caches leave out layers in some steps."""
        self._is_provisional = False
        """Whether only keyframes and the like had the usual workload, such as the step before guidance is known."""
        self._other_steps = 0
        """Number of steps in a row with another workload."""
        self._seconds: dict[_Workload, list[float]] = {}
        """Step time of each complete round, in seconds, by workload."""
        self._last: Sequence[Candidates[Any]] = ()
        """Candidates of the layers of the last step that had any; others may never run again."""
        self._step_start: float | None = None
        """Start time of the current step; None where the step is not timed."""

    @property
    def settled(self) -> bool:
        """Whether there are candidates, and all of the last step with any are chosen."""
        return bool(self._last) and all(each.chosen is not None for each in self._last)

    def begin_run(self) -> None:
        """Begin a run. All ranks use PLUGIN in its first step, which is not timed, unless they have agreed on a choice.

        An error or an interrupt may have ended the last run after different steps on each rank, and the ranks agree on
        the complete rounds only once they have communicated. An incomplete pass is repeated.
        """
        self._step_start, self._is_new_run, self._workload, self._other_steps = None, True, (), 0
        for each in self._candidates():
            each.end_step()
            each.candidate = PLUGIN
        for each in self._unconfirmed:
            each.is_held = True
        for workload, seconds in self._seconds.items():
            del seconds[len(seconds) // len(_indexes(workload)) * len(_indexes(workload)) :]

    def end_step(self) -> None:
        """End a step: add its time to the complete rounds, and begin the next round or choose."""
        workload = self._undecided()
        if self._is_new_run and any(each.calls for each in self._candidates()):
            self._is_new_run = False
            self._start_over_unless_equal()  # also without a workload: other ranks may have one
            workload = self._undecided()
        is_tuning = bool(workload or self._workload)
        if is_tuning:
            if self._is_asynchronous:
                torch.accelerator.synchronize()
            self._end_round(workload)
        self._last = [each for each in self._candidates() if each.calls] or self._last
        for each in self._candidates():
            each.end_step()
        # Unless the device was synchronized, it may still be busy with the last step.
        self._step_start = time.perf_counter() if is_tuning or not self._is_asynchronous else None

    def _undecided(self) -> _Workload:
        """Return the workload of the current step."""
        return tuple((each, each.calls) for each in self._candidates() if each.calls and each.chosen is None)

    def _end_round(self, workload: _Workload) -> None:
        """Add the time of the last step if its workload was the usual one, and begin the next round."""
        is_representative = all(each.is_representative for each, _ in workload)
        if workload != self._workload:
            self._update_workload(workload, is_representative)
        else:
            self._other_steps = 0
            self._is_provisional &= not is_representative
            if self._step_start is not None and is_representative:
                self._seconds[workload].append(time.perf_counter() - self._step_start)
        if self._workload:
            self._begin_round()

    def _update_workload(self, workload: _Workload, is_representative: bool) -> None:
        """Make another workload the usual one if it is larger or that one is provisional, or if the other one has
        lasted for more steps than there are rounds: without declared runs, all later steps may have another size."""
        self._other_steps += 1
        num_rounds = len(rounds(_indexes(self._workload)))
        is_larger = _num_calls(workload) > _num_calls(self._workload)
        replaces = bool(workload) and is_representative and self._is_provisional
        if is_larger or replaces or self._other_steps > num_rounds:
            self._workload, self._other_steps, self._is_provisional = workload, 0, not is_representative

    def _begin_round(self) -> None:
        """Set the candidate of the next round, or choose if all rounds are complete."""
        seconds, indexes = self._seconds.setdefault(self._workload, []), _indexes(self._workload)
        order, size = rounds(indexes), len(indexes)
        if len(seconds) == len(order):
            self._unconfirmed += [each for each, _ in self._workload]
            timed = list(zip(order, self._mean(seconds), strict=True))
            self._choose(
                [each for each, _ in self._workload],
                [dict(timed[first : first + size]) for first in range(size, len(timed), size)],
            )
            self._workload = tuple(pair for pair in self._workload if pair[0].chosen is None)
            self._seconds.clear()  # other workloads may have layers with the same candidates
            if self._workload:
                self._begin_round()
            return
        for each, _ in self._workload:
            each.candidate = order[len(seconds)]

    def _choose(self, layers: Sequence[Any], passes: Sequence[Mapping[int, float]]) -> None:
        """Choose among the candidates of all layers of the usual step, or set other ones to be timed.

        Args:
            layers: the candidates of the layers.
            passes: step time by each of :func:`distinct_candidates`, as the mean over all ranks, for each pass that
                counts.
        """
        raise NotImplementedError

    def _start_over_unless_equal(self) -> None:
        """Drop all complete rounds and choices of this process unless all ranks have the same ones."""
        candidates = self._candidates()
        complete_rounds = sorted(
            ([(candidates.index(each), calls) for each, calls in workload], len(seconds))
            for workload, seconds in self._seconds.items()
        )
        if not self._all_agree((complete_rounds, self._state())):
            self._start_over()
        for each in self._unconfirmed:
            each.is_held = False
        self._unconfirmed.clear()

    def _state(self) -> object:
        """Return further state that must be equal on all ranks, without values that differ between processes."""
        return [each.chosen for each in self._candidates() if each.calls]

    def _start_over(self) -> None:
        """Drop all complete rounds and choices."""
        self._seconds.clear()
        for each in self._candidates():
            each.restart()


def rounds(indexes: Sequence[int]) -> list[int]:
    """Return the candidate of each round. A round is one step; each second pass has the reverse order, so that a drift
    of the machine's speed favors no candidate.

    Args:
        indexes: the candidates.
    """
    return [*indexes, *reversed(indexes)] * (PASSES // 2)


def _indexes(workload: _Workload) -> list[int]:
    return distinct_candidates([each for each, _ in workload])


def _num_calls(workload: _Workload) -> int:
    return sum(calls for _, calls in workload)
