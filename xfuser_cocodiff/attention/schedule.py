"""What overlaps in an attention layer, by which of these ways a kind of them may run, and what trying may cost."""

from collections.abc import Sequence
from typing import NamedTuple

from xfuser_cocodiff.exchange.head_group import HeadGroup

BESIDE_QKV, BESIDE_O = BESIDE = ("Q, K and V", "O")
"""What travels while an MLP is computed that lies beside attention."""
GROUP_COUNTS = (1, 2, 4, 8)
"""Numbers of head groups that are tried."""


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
    """What one kind of layer may run by, and what it runs by until that is settled. All ranks must call its methods
    alike.

    Args:
        schedules: to choose from, the one without overlap first, then by their numbers of groups.
        has_mlp: whether an MLP may be computed beside.
    """

    def __init__(self, schedules: Sequence[Schedule], has_mlp: bool = False) -> None:
        self.schedules, self.has_mlp = tuple(schedules), has_mlp
        self.chosen: Schedule | None = None if len(self.schedules) > 1 or has_mlp else self.schedules[0]
        self._now = self.schedules[0]
        self.calls = 0
        """Layers that have run in this step."""
        self.is_usual = True
        """Whether all of them did what most steps do: a refresh says nothing of others."""

    @property
    def schedule(self) -> Schedule:
        """The one to run by next."""
        return self.chosen or self._now

    def ran(self, is_usual: bool = True) -> None:
        """Tell that a layer has run by :attr:`schedule`."""
        self.calls += 1
        self.is_usual &= is_usual

    def end_step(self) -> None:
        """A step is over in which layers of this kind may have run."""
        self.calls, self.is_usual = 0, True

    def nearest(self, wanted: Schedule) -> Schedule:
        """Of what it may run by, the nearest to what is wanted of all kinds."""
        few = [one for one in self.schedules if one.groups <= wanted.groups] or self.schedules[:1]
        found = [one for one in few if one.v_first == wanted.v_first] or few
        return found[-1]._replace(beside=wanted.beside if self.has_mlp else "")

    def run_by(self, wanted: Schedule) -> None:
        """Run by the nearest to it from now on."""
        self._now = self.nearest(wanted)


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
