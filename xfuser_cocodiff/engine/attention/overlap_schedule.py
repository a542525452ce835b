"""What overlaps in an attention layer, and which of two such schedules a kind of layer runs by."""

from collections.abc import Sequence
from typing import NamedTuple


class Schedule(NamedTuple):
    """How the exchanges of one attention layer overlap with its computation."""

    v_first: bool = False
    """Whether V's exchange starts before Q and K are there."""
    groups: int = 1
    """Into how many groups the heads of a rank are cut, each attending while others travel."""
    beside: bool = False
    """Whether an MLP beside attention is computed while Q, K and V travel, rather than when the block asks for it."""
    flat: bool = False
    """Whether exchanges are flat collectives, as stock's, and not by the planner's plan."""

    def __str__(self) -> str:
        first, groups = "V first" if self.v_first else "together", f"{self.groups} head group{'s' * (self.groups > 1)}"
        return f"{first}, {groups}{', MLP beside Q, K and V' * self.beside}{', flat' * self.flat}"


STOCKS, OURS = 0, 1
"""Places of the two schedules of a :class:`Trial`."""


class Trial:
    """The schedule of one kind of layer: of two, the one whose turn it is, until one is chosen. All ranks must call its
    methods in the same order.

    Args:
        schedules: stock's way and the plugin's; or one, where nothing is to be tried.
    """

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self.schedules = tuple(schedules)
        self.chosen: Schedule | None = self.schedules[0] if len(set(self.schedules)) == 1 else None
        self.turn = OURS
        """STOCKS or OURS, while none is chosen."""
        self.calls = 0
        """Layers that have run in this step."""
        self.is_usual = True
        """Whether all of them did what most steps do: an exact refresh says nothing of coded steps."""

    @property
    def schedule(self) -> Schedule:
        """The one to run by next."""
        return self.chosen or self.schedules[self.turn]

    def ran(self, is_usual: bool = True) -> None:
        """Count a layer that has run by :attr:`schedule`."""
        self.calls += 1
        self.is_usual &= is_usual

    def end_step(self) -> None:
        """Start to count anew."""
        self.calls, self.is_usual = 0, True

    def choose(self, which: int) -> None:
        """Run by one of the two from now on."""
        self.chosen = self.schedules[which]
