"""Overlap schedules of attention layers."""

from typing import NamedTuple


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
