"""A race of schedules: by which of them steps are fastest, found by use.

Every schedule gives the same bits, so that trying them costs nothing but their time. They take turns by whole steps:
what one layer need not wait for, another may have to, and what a schedule takes of a processor, other ranks may lack.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev

from xfuser_cocodiff.attention.schedule import BESIDE, Schedule, Trial

MUST_SAVE = 0.01
"""Share of a step that a schedule must save for sure to be taken."""
_SURE = 2
"""Standard errors that a saving is to be away from that."""
LEAST_ROUNDS, MOST_ROUNDS = 4, 10
"""In each of which a schedule has a step: before something is decided, and until nothing can be, and the best so far
stays."""


class Race:
    """A race of what some kinds of layers may run by. All ranks must call its methods alike.

    One heat comes after the other: no overlap against V first and few groups of heads, then more groups as long as they
    help, and the best of them against itself with the MLP beside.

    Args:
        trials: of the kinds; all of them run by the same schedule, or by what is nearest to it.
    """

    def __init__(self, trials: tuple[Trial, ...]) -> None:
        self.trials = trials
        self._has_mlp = any(trial.has_mlp for trial in trials)
        self._heats = _by_groups({schedule for trial in trials for schedule in trial.schedules})
        """Those that are to come."""
        self._best, self._most_groups = self._heats[0][0], 0
        """And the most groups that had a heat."""
        self._entrants = self._order = [self._best]
        self._round: list[float] = []
        self._goes_on = False
        self._calls = 0
        """Of layers, in a step of this run that says something of others."""
        self.cost_seconds = 0.0
        """What trying has cost this rank, since somebody last asked: time beyond that of the best."""
        self.is_over = False
        """Whether all kinds have their schedule."""
        self._next_heat()
        self._take_turn()

    def begin_run(self) -> None:
        """A run begins, in whose steps as many layers may run as in no other."""
        self._calls, self._round = 0, []
        self._take_turn()

    @property
    def is_ripe(self) -> bool:
        """Whether each schedule has had its step of this round, so that ranks can agree on what that says."""
        return not self.is_over and len(self._round) == len(self._entrants)

    def took(self, seconds: float) -> None:
        """Tell how long a step took in which its kinds have run. One in which fewer layers ran than in others says
        nothing, as where steps are cached."""
        calls = sum(trial.calls for trial in self.trials)
        if self.is_over or not self._goes_on or calls < self._calls or not all(trial.is_usual for trial in self.trials):
            return
        if calls > self._calls:
            self._calls, self._round = calls, []
        else:
            entrant = self._order[len(self._round)]
            self._round.append(seconds)
            if entrant == self._best:
                self._own.append(seconds)
            elif self._own:
                self.cost_seconds += max(0.0, seconds - median(self._own))
        if not self.is_ripe:
            self._take_turn()

    def report(self) -> list[float]:
        """What this rank's steps have taken in a round that is ripe."""
        return list(self._round) if self.is_ripe else []

    def decide(self, seconds: Sequence[float], goes_on: bool) -> None:
        """Decide what can be decided.

        Args:
            seconds: what all ranks report, taken together.
            goes_on: whether there is time for trying from now on.
        """
        if self.is_ripe:
            self._end_round(seconds)
        if goes_on != self._goes_on:
            self._goes_on, self._round = goes_on, []
        self._take_turn()

    def _end_round(self, seconds: Sequence[float]) -> None:
        """Judge all that are still in the heat by what is known now; in the first round memory is new."""
        if self._rounds:
            for entrant, took in zip(self._order, seconds, strict=True):
                self._seconds[entrant].append(took)
        self._rounds += 1
        known = self._rounds - 1
        if known >= LEAST_ROUNDS:
            self._judge(is_last=known >= MOST_ROUNDS)
        self._round = []
        if len(self._entrants) == 1:
            self._next_heat()
        else:
            self._order = self._entrants[:: -1 if self._rounds % 2 else 1]

    def _judge(self, is_last: bool) -> None:
        savings = {one: self._saving(one) for one in self._entrants[1:]}
        surely = {one: mean for one, (mean, error) in savings.items() if mean - error > MUST_SAVE}
        maybe = [one for one, (mean, error) in savings.items() if mean - error <= MUST_SAVE < mean + error]
        if maybe and not is_last:
            self._entrants = [self._best, *(one for one in savings if one in surely or one in maybe)]
            return
        self._best = max(surely, key=surely.__getitem__, default=self._best)
        self._entrants = [self._best]

    def _saving(self, entrant: Schedule) -> tuple[float, float]:
        """Of a step's time, in the mean, and how far off that may be. Rounds are held against each other, since a
        machine changes its pace."""
        pairs = zip(self._seconds[self._best], self._seconds[entrant], strict=True)
        savings = [1 - took / best if best else 0.0 for best, took in pairs]
        return fmean(savings), _SURE * stdev(savings) / math.sqrt(len(savings))

    def _next_heat(self) -> None:
        """Begin the next heat in which there is something to choose, or end."""
        self._rounds, self._round = 0, []
        self._own: list[float] = []
        if self._best.groups < self._most_groups:  # more than those that do not help help less
            self._heats.clear()
        while self._heats or self._has_mlp:
            if self._heats:
                challengers = self._heats.pop(0)
                self._most_groups = challengers[-1].groups
            else:
                self._has_mlp, challengers = False, [self._best._replace(beside=beside) for beside in BESIDE]
            different: dict[tuple[Schedule, ...], Schedule] = {}
            for one in (self._best, *challengers):
                different.setdefault(tuple(trial.nearest(one) for trial in self.trials), one)
            if len(different) > 1:
                self._entrants = self._order = list(different.values())
                self._seconds: dict[Schedule, list[float]] = {one: [] for one in self._entrants}
                return
        self.is_over = True
        for trial in self.trials:
            trial.chosen = trial.nearest(self._best)

    def _take_turn(self) -> None:
        """The next one runs, or the best where there is no time for others."""
        for trial in self.trials:
            trial.run_by(self._order[len(self._round)] if self._goes_on else self._best)


def _by_groups(schedules: Iterable[Schedule]) -> list[list[Schedule]]:
    """Heats: those with fewest groups and with the next number of them, then each number by itself."""
    ordered = sorted(schedules, key=lambda one: (one.groups, one.v_first))
    counts = sorted({one.groups for one in ordered})
    return [[one for one in ordered if one.groups in some] for some in (counts[:2], *([count] for count in counts[2:]))]
