"""Autotuning of overlap schedules, by whole steps with each of the candidates."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

import torch

from xfuser_cocodiff.engine.attention.overlap_schedule import PLUGIN, ScheduleCandidates
from xfuser_cocodiff.xdit.session.step_tuner import StepTuner

MIN_SAVING = 0.01
"""Fraction of the step time that another candidate than the plugin's schedule must save to be chosen."""

_Candidate = TypeVar("_Candidate", int, str)


class ScheduleTuner(StepTuner):
    """Autotunes the overlap schedules of a session. All ranks must call its methods in the same order.

    Args:
        candidates: returns the candidates of all layer signatures so far, in an order that is the same on all ranks.
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
        super().__init__(candidates, mean, all_agree, device)
        self._on_choice = on_choice

    def _choose(self, layers: Sequence[ScheduleCandidates], passes: Sequence[Mapping[int, float]]) -> None:
        savings = {index: median(1 - each[index] / each[PLUGIN] for each in passes) for index in passes[0]}
        index = choose_by_saving(savings, PLUGIN)
        for each in layers:
            each.choose(index)
        self._on_choice()


def choose_by_saving(savings: Mapping[_Candidate, float], usual: _Candidate) -> _Candidate:
    """Return the candidate that saves the most, if that is more than :data:`MIN_SAVING`, else the usual one.

    Args:
        savings: fraction of the usual candidate's step time that each candidate saves.
        usual: the usual candidate.
    """
    best = max(savings, key=lambda each: savings[each], default=usual)
    return best if savings.get(best, 0.0) > MIN_SAVING else usual
