"""Overlap schedules of attention layers."""

from typing import NamedTuple

Division = tuple[int, bool]
"""How attention is divided: the number of head groups, and whether K and V are gathered along the outermost axes."""
BY_HEADS: Division = (1, False)
"""All heads at once, divided over all ranks, as in stock xDiT."""


class OverlapSchedule(NamedTuple):
    """How the all-to-alls of one attention layer overlap with its computation."""

    v_first: bool = False
    """Whether the all-to-all of V starts before Q and K are computed."""
    groups: int = 1
    """Number of head groups; one group attends while the others are in flight."""
    overlaps_mlp: bool = False
    """Whether a parallel MLP is computed while Q, K and V are in flight, and not when the block calls it."""
    stock: bool = False
    """Whether stock xDiT's attention runs, with its own all-to-alls."""
    gathers_kv: bool = False
    """Whether K and V are gathered along the outermost axes in a lossless mode. In a lossy mode it is not a matter of
    the schedule, since link references depend on it."""

    @property
    def division(self) -> Division:
        """How attention is divided."""
        return self.groups, self.gathers_kv

    def divided(self, division: Division) -> "OverlapSchedule":
        """Return the schedule with another division."""
        groups, gathers_kv = division
        return self._replace(groups=groups, gathers_kv=gathers_kv)

    def __str__(self) -> str:
        if self.stock:
            return "stock"
        order, plural = "V first" if self.v_first else "QKV together", "s" * (self.groups > 1)
        return (
            f"{order}, {self.groups} head group{plural}{', MLP overlapped' * self.overlaps_mlp}"
            f"{', K and V gathered' * self.gathers_kv}"
        )
