"""What overlaps in an attention layer, and which way is fastest: found by use, in the first layers of a run.

Every way gives the same bits, so that trying them costs nothing but their time.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

GROUP_COUNTS = (1, 2, 4, 8)
"""Numbers of head groups that are tried."""
SAMPLES = 4
"""Layers that run by each schedule; the first of them does not count, since its exchanges may be of new sizes."""
MUST_SAVE = 0.02
"""Share of the time without overlap that a schedule must save."""


class Schedule(NamedTuple):
    """How the exchanges of one attention layer overlap with its computation."""

    v_first: bool = False
    """Whether V's exchange starts before Q and K are there."""
    groups: int = 1
    """Into how many groups the heads of a rank are cut, each attending while others travel."""

    def __str__(self) -> str:
        return f"{'V first' if self.v_first else 'together'}, {self.groups} head group{'s' * (self.groups > 1)}"


class Trial:
    """Chooses among schedules by the time that they take. All ranks must call its methods alike.

    Args:
        schedules: to choose from, the one without overlap first.
        agreed: given one number for each schedule, the numbers that all ranks go by.
    """

    def __init__(self, schedules: Sequence[Schedule], agreed: Callable[[list[float]], list[float]]) -> None:
        self._schedules, self._agreed = list(schedules), agreed
        self._samples: list[list[float]] = [[] for _ in schedules]
        self._calls = 0
        self.chosen: Schedule | None = self._schedules[0] if len(self._schedules) == 1 else None

    @property
    def schedule(self) -> Schedule:
        """The one to run by next."""
        return self.chosen or self._schedules[self._calls % len(self._schedules)]

    def took(self, seconds: float) -> None:
        """Tell how long a layer took by :attr:`schedule`; the last sample decides."""
        if self.chosen:
            return
        self._samples[self._calls % len(self._schedules)].append(seconds)
        self._calls += 1
        if self._calls == SAMPLES * len(self._schedules):
            plain, *others = self._agreed([median(sample[1:]) for sample in self._samples])
            best = min(range(len(others)), key=others.__getitem__)
            self.chosen = self._schedules[1 + best if others[best] < (1 - MUST_SAVE) * plain else 0]
