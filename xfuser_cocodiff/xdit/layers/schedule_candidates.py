"""Candidates among the overlap schedules of attention layers, which autotuning compares."""

from collections.abc import Sequence

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule

PLUGIN = 1
"""Index of the plugin's schedule among several of :class:`ScheduleCandidates`: after the one that overlaps nothing, and
before other divisions."""


class ScheduleCandidates:
    """The overlap schedules that layers of one signature may run by, and the one that autotuning chose.

    They are stock's, the plugin's, and the plugin's with head groups; or a single one. All ranks must call its methods
    in the same order.

    Args:
        schedules: the candidates; :data:`PLUGIN` is the index of the one that others are compared with. A single one is
            chosen at once.
    """

    def __init__(self, schedules: Sequence[OverlapSchedule]) -> None:
        self.schedules = tuple(schedules)
        self.chosen: OverlapSchedule | None = None
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
    def schedule(self) -> OverlapSchedule:
        """Candidate by which the next layer runs: the chosen one, else the one under test."""
        return self.at(self.candidate) if self.chosen is None or self.is_held else self.chosen

    @property
    def runs_stock(self) -> bool:
        """Whether stock's attention was chosen, by all ranks."""
        return self.chosen is not None and self.chosen.stock and not self.is_held

    def at(self, index: int) -> OverlapSchedule:
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


def distinct_candidates(layers: Sequence[ScheduleCandidates]) -> list[int]:
    """Return the indexes under which layers that are tuned together run by different schedules, the plugin's first."""
    size = max((len(each.schedules) for each in layers), default=0)
    indexes: dict[tuple[OverlapSchedule, ...], int] = {}
    for index in sorted(range(size), key=lambda each: each != PLUGIN):
        indexes.setdefault(tuple(each.at(index) for each in layers), index)
    return list(indexes.values())
