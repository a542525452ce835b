"""What overlaps in an attention layer, and which way is fastest: found by use, in the layers of a run.

Every way gives the same bits, so that trying them costs nothing but their time. In each step some of the layers of a
kind run by the schedule that is tried, and the others by the best one so far, against which it is held.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from xfuser_cocodiff.exchange.head_group import HeadGroup

BESIDE_QKV, BESIDE_O = BESIDE = ("Q, K and V", "O")
"""What travels while an MLP is computed that lies beside attention."""
GROUP_COUNTS = (1, 2, 4, 8)
"""Numbers of head groups that are tried."""
SAMPLES = 3
"""Layers that count of each schedule; one more before them does not, since its memory is new."""
MUST_SAVE = 0.02
"""Share of the best one's time that a schedule must save."""
_TRIED_SHARE, _LEAST_TRIED = 0.25, 2
"""Of the layers of a kind in a step that run by the schedule that is tried."""


class Schedule(NamedTuple):
    """How the exchanges of one attention layer overlap with its computation."""

    v_first: bool = False
    """Whether V's exchange starts before Q and K are there."""
    groups: int = 1
    """Into how many groups the heads of a rank are cut, each attending while others travel."""
    beside: str = ""
    """What travels while an MLP is computed that lies beside attention and is needed later only: one of BESIDE; nothing
    where it is computed when the block asks for it."""

    @property
    def head_groups(self) -> list[HeadGroup]:
        """They, in order."""
        return [HeadGroup(index, self.groups) for index in range(self.groups)]

    def __str__(self) -> str:
        first, beside = "V first" if self.v_first else "together", f", MLP beside {self.beside}" if self.beside else ""
        return f"{first}, {self.groups} head group{'s' * (self.groups > 1)}{beside}"


class Trial:
    """Chooses among schedules by the time that they take. All ranks must call its methods alike.

    Args:
        schedules: to choose from, the one without overlap first, then by their numbers of groups.
        has_mlp: whether an MLP may be computed beside; then the best of them is tried with that, too, in each way.
    """

    def __init__(self, schedules: Sequence[Schedule], has_mlp: bool = False) -> None:
        self._schedules, self._has_mlp = list(schedules), has_mlp
        self._samples = [deque[float](maxlen=4 * SAMPLES) for _ in schedules]
        self._seen = [0 for _ in schedules]
        self._tried = self._best = 0
        """By their numbers."""
        self._goes_on = False
        self._quota = self._calls = self._tries = 0
        """Layers of this step that may run by the one that is tried; that have run, and that have done so by it."""
        self.cost_seconds = 0.0
        """What trying has cost this rank, since somebody last asked: time beyond that of the best."""
        self.chosen: Schedule | None = None if len(self._schedules) > 1 or has_mlp else self._schedules[0]

    @property
    def schedule(self) -> Schedule:
        """The one to run by next."""
        return self.chosen or self._schedules[self._number]

    @property
    def _number(self) -> int:
        return self._tried if self._tries < self._quota and not self.is_ripe else self._best

    @property
    def is_ripe(self) -> bool:
        """Whether enough is known to decide; the same on every rank."""
        return self.chosen is None and len(self._samples[self._tried]) >= SAMPLES

    def took(self, seconds: float) -> None:
        """Tell how long a layer took by :attr:`schedule`."""
        if self.chosen:
            return
        number = self._number
        self._calls += 1
        if number != self._best:
            self._tries += 1
            self.cost_seconds += max(0.0, seconds - median(self._samples[self._best]))
        self._seen[number] += 1
        if self._seen[number] > 1:
            self._samples[number].append(seconds)

    def report(self) -> list[float]:
        """What each schedule took on this rank, in seconds; 0 where that is not known."""
        return [median(samples) if samples else 0.0 for samples in self._samples]

    def end_step(self) -> None:
        """A step is over in which layers of this kind may have run."""
        self._quota = max(_LEAST_TRIED, int(_TRIED_SHARE * self._calls)) if self._goes_on else 0
        self._calls = self._tries = 0

    def decide(self, seconds: Sequence[float], goes_on: bool) -> None:
        """Decide what can be decided.

        Args:
            seconds: what all ranks report, taken together.
            goes_on: whether there is time for trying from now on.
        """
        self._goes_on = goes_on
        if not self.is_ripe:
            return
        tried, better = self._tried, True
        if tried != self._best:  # else it is the first one: there is nothing yet to hold against it
            better = seconds[tried] < (1 - MUST_SAVE) * seconds[self._best]
            self._best = tried if better else self._best
        self._tried += 1
        # More groups than those that do not help help less.
        is_asked = better or self._schedules[tried].groups == 1 or self._schedules[tried].beside
        if self._tried < len(self._schedules) and is_asked:
            return
        best = self._schedules[self._best]
        if not self._has_mlp:
            self.chosen = best
            return
        self._has_mlp = False
        self._tried = len(self._schedules)
        for beside in BESIDE:
            self._schedules.append(best._replace(beside=beside))
            self._samples.append(deque(maxlen=4 * SAMPLES))
            self._seen.append(0)


class Allowance:
    """What trials may take of the time of a run, so that the first run of a machine is not a slow one.

    Args:
        share: of the run.
    """

    def __init__(self, share: float = 0.015) -> None:
        self.share = share
        self.begin_run(None)

    def begin_run(self, total: int | None) -> None:
        """A run begins, of so many steps if that is known."""
        self._total, self._step_seconds, self._steps = total, 0.0, 0
        self.spent = 0.0
        """Seconds in this run."""

    def learn(self, step_seconds: float, steps: int, spent: float) -> None:
        """How long a step takes, how many are over, and what trials have taken since this was last known."""
        self._step_seconds, self._steps = step_seconds, steps
        self.spent += spent

    @property
    def left(self) -> float:
        """Seconds that trials may still take in this run: a share of what it has taken and is expected to take."""
        return self.share * self._step_seconds * max(self._total or 0, self._steps) - self.spent

    @property
    def whole(self) -> float | None:
        """Seconds that a run like this one has for trials; None where that is not known."""
        return self.left + self.spent if self._total and self._steps else None
