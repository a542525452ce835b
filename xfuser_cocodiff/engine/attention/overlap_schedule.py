"""Overlap schedules of attention layers, and the candidates that autotuning compares."""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar


class OverlapSchedule(NamedTuple):
    """How the all-to-alls of one attention layer overlap with its computation."""

    v_first: bool = False
    """Whether the all-to-all of V starts before Q and K are computed."""
    groups: int = 1
    """Number of head groups; one group attends while the others are in flight."""
    overlaps_mlp: bool = False
    """Whether a parallel MLP is computed while Q, K and V are in flight, and not when the block calls it."""
    flat: bool = False
    """Whether all-to-alls are flat collectives, as in stock xDiT, instead of following the planner's plans."""
    gathers_kv: bool = False
    """Whether K and V are gathered along the outermost axes in a lossless mode. In a lossy mode it is not a matter of
    the schedule, since link references depend on it."""

    def __str__(self) -> str:
        order, plural = "V first" if self.v_first else "QKV together", "s" * (self.groups > 1)
        return (
            f"{order}, {self.groups} head group{plural}{', MLP overlapped' * self.overlaps_mlp}{', flat' * self.flat}"
            f"{', K and V gathered' * self.gathers_kv}"
        )


STOCK, PLUGIN = 0, 1
"""Indexes of the first two schedules of :class:`ScheduleCandidates`; those with head groups follow."""
_Candidate = TypeVar("_Candidate")


class Candidates(Generic[_Candidate]):
    """The candidates that some layers may run by, such as overlap schedules, and the one that autotuning chose.

    All ranks must call its methods in the same order.

    Args:
        schedules: the candidates; :data:`PLUGIN` is the index of the one that others are compared with. A single one is
            chosen at once.
    """

    def __init__(self, schedules: Sequence[_Candidate]) -> None:
        self.schedules = tuple(schedules)
        self.chosen: _Candidate | None = None
        self.is_held = False
        """Whether the choice waits for an agreement of all ranks."""
        self.candidate = PLUGIN
        """Index of the candidate under test, until one is chosen."""
        self.calls = 0
        """Number of layers that ran in this step."""
        self.is_representative = True
        """Whether all layers of this step did the usual work. The time of a lossless keyframe says nothing about
        lossy steps."""
        self.restart()

    def restart(self) -> None:
        """Drop the choice, unless there is a single candidate."""
        self.chosen = self.schedules[0] if len(set(self.schedules)) == 1 else None

    @property
    def schedule(self) -> _Candidate:
        """Candidate by which the next layer runs: the chosen one, else the one under test."""
        return self.at(self.candidate) if self.chosen is None or self.is_held else self.chosen

    def at(self, index: int) -> _Candidate:
        """Return the candidate of an index; the plugin's where the layers have fewer candidates than others."""
        return self.schedules[index if index < len(self.schedules) else PLUGIN]

    def count_call(self, is_representative: bool = True) -> None:
        """Count a layer that ran by :attr:`schedule`."""
        self.calls += 1
        self.is_representative &= is_representative

    def end_step(self) -> None:
        """Reset the counts for the next step."""
        self.calls, self.is_representative = 0, True

    def choose(self, index: int) -> None:
        """Use the candidate of an index from now on."""
        self.chosen = self.at(index)


class ScheduleCandidates(Candidates[OverlapSchedule]):
    """The overlap schedules that layers of one signature may run by, and the one that autotuning chose: stock's, the
    plugin's, and the plugin's with head groups; or a single one."""


def distinct_candidates(layers: Sequence[Candidates[Any]]) -> list[int]:
    """Return the indexes under which layers that are tuned together run by different schedules, the plugin's first."""
    size = max((len(each.schedules) for each in layers), default=0)
    indexes: dict[tuple[Any, ...], int] = {}
    for index in sorted(range(size), key=lambda each: each != PLUGIN):
        indexes.setdefault(tuple(each.at(index) for each in layers), index)
    return list(indexes.values())
