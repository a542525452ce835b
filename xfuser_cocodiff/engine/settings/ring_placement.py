"""Where Ulysses and where the ring lie: which of the two joins neighbouring ranks, and which the ranks far apart.

The ranks that share a sequence are numbered along the machine. xDiT makes Ulysses groups of neighbouring ranks, so that
the ring crosses the slowest axis: `outer`. The other way round, `inner`, the ring joins neighbours, and Ulysses groups
stride over the machine. Every rank keeps its part of the sequence either way: only the order differs in which it meets
the K and V of the others.
"""

from dataclasses import dataclass

from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.topology import AXIS_NAMES, Topology

OUTER, INNER = PLACEMENTS = ("outer", "inner")
"""Where the ring lies; outer is xDiT's own."""


@dataclass(frozen=True)
class UlyssesRingSplit:
    """How the ranks of a sequence-parallel group are parted."""

    ulysses: int
    """Ulysses degree."""
    ring: int
    """Ring degree."""
    placement: str = OUTER

    def ulysses_topology(self, whole: Topology) -> Topology:
        """Topology of a Ulysses group, given that of all ranks."""
        return whole.strided(self.ulysses) if self.placement == INNER else whole.contiguous(self.ulysses)

    def ring_topology(self, whole: Topology) -> Topology:
        """Topology of a ring, given that of all ranks."""
        return whole.contiguous(self.ring) if self.placement == INNER else whole.strided(self.ring)

    def fits(self, whole: Topology) -> bool:
        """Whether every Ulysses group, and every ring, lies on the axes as the others do."""
        known = {axis.name for axis in whole.axes}
        parts = self.ulysses_topology(whole), self.ring_topology(whole)
        return all({axis.name for axis in part.axes if axis.size > 1} <= known for part in parts)


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that share a sequence, as the launcher has them."""

    ulysses: int
    """Ulysses degree."""
    detected: Topology
    """Of so many neighbouring ranks: it is used when none is given, and tells whether these lie on several nodes."""
    ring: int = 1
    """Ring degree."""
    full_topology: Topology | None = None
    """Of all ranks of both; None without a ring."""

    @property
    def whole(self) -> int:
        """Number of ranks."""
        return self.ulysses * self.ring


@dataclass(frozen=True)
class GroupPlacement:
    """Where the Ulysses groups and rings of a run lie."""

    topology: Topology
    """Of a Ulysses group."""
    ring_topology: Topology | None = None
    """Of a ring; None where there is none."""
    profile: Profile | None = None
    """Of the Ulysses group's axes, where one of all ranks is known."""
    ring_profile: Profile | None = None
    """Of the ring's axes, likewise."""


def place_groups(ranks: SequenceRanks, given: Topology | None, ring: str, profile: Profile | None) -> GroupPlacement:
    """Settle where Ulysses groups and rings lie.

    Args:
        ranks: those that share a sequence.
        given: topology that the user gave, of a Ulysses group or of all ranks.
        ring: placement of the ring.
        profile: what is known of links; it counts here if it is of all ranks.

    Raises:
        ValueError: the groups do not lie on the axes of the profile.
    """
    if ranks.ring == 1:
        return GroupPlacement(given or ranks.detected)
    assert ranks.full_topology  # there is a ring
    whole = given if given and given.size == ranks.whole else ranks.full_topology
    known = profile if profile and profile.topology == whole and given in (None, whole) else None
    if ranks.ulysses == 1:
        return GroupPlacement(ranks.detected, whole, None, known)
    split = UlyssesRingSplit(ranks.ulysses, ranks.ring, ring)
    if known and not split.fits(whole):
        raise ValueError(
            f"{ring!r} is not valid: Ulysses groups of {ranks.ulysses} and rings of {ranks.ring} ranks do not align "
            f"with the axes of the profile, {whole}; valid are degrees that do, or no --cocodiff_profile"
        )
    around = split.ring_topology(whole)
    if given not in (None, whole):
        return GroupPlacement(given, around)
    topology = ranks.detected if ring == OUTER and not (given or known) else split.ulysses_topology(whole)
    return GroupPlacement(topology, around, known and known.restrict_to(topology), known and known.restrict_to(around))


def has_nodes(topology: Topology) -> bool:
    """Whether ranks lie on several nodes."""
    return any(axis.name == AXIS_NAMES[0] and axis.size > 1 for axis in topology.axes)
