"""Placement of Ulysses groups and rings: which of the two joins neighboring ranks, and which joins distant ones.

The ranks that share a sequence are numbered along the machine. xDiT makes Ulysses groups of neighboring ranks, so the
ring crosses the slowest axis: placement `outer`. With placement `inner` the ring joins neighbors, and Ulysses groups
stride over the machine. Every rank holds the same part of the sequence either way; only the order in which it receives
the K and V of other ranks differs.
"""

from dataclasses import dataclass

from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.topology import AXIS_NAMES, Topology

OUTER, INNER = PLACEMENTS = ("outer", "inner")
"""Placements of the ring; outer is xDiT's."""


@dataclass(frozen=True)
class UlyssesRingSplit:
    """Split of a sequence-parallel group into Ulysses groups and rings."""

    ulysses: int
    """Ulysses degree."""
    ring: int
    """Ring degree."""
    placement: str = OUTER
    """Placement of the ring, one of PLACEMENTS."""

    def ulysses_topology(self, full: Topology) -> Topology:
        """Return the topology of a Ulysses group, given that of all ranks."""
        return full.strided(self.ulysses) if self.placement == INNER else full.contiguous(self.ulysses)

    def ring_topology(self, full: Topology) -> Topology:
        """Return the topology of a ring, given that of all ranks."""
        return full.contiguous(self.ring) if self.placement == INNER else full.strided(self.ring)

    def fits(self, full: Topology) -> bool:
        """Return whether Ulysses groups and rings align with the axes of all ranks: none is flat."""
        known = {axis.name for axis in full.axes}
        parts = self.ulysses_topology(full), self.ring_topology(full)
        return all({axis.name for axis in part.axes if axis.size > 1} <= known for part in parts)


@dataclass(frozen=True)
class SequenceRanks:
    """Ranks that share a sequence, with the topology that the launcher implies."""

    ulysses: int
    """Ulysses degree."""
    topology: Topology
    """Detected topology of all ranks."""
    ring: int = 1
    """Ring degree."""

    @property
    def count(self) -> int:
        """Number of ranks."""
        return self.ulysses * self.ring


@dataclass(frozen=True, kw_only=True)
class GroupPlacement:
    """Topologies and link profiles of the Ulysses groups and rings of a run."""

    topology: Topology
    """Topology of a Ulysses group."""
    ring: str = OUTER
    """Placement of the ring, one of PLACEMENTS."""
    ring_topology: Topology | None = None
    """Topology of a ring; None without one."""
    profile: Profile | None = None
    """Link profile of a Ulysses group; None lets the planner probe its links."""
    ring_profile: Profile | None = None
    """Link profile of a ring; None lets the planner probe its links."""


def place_groups(
    ranks: SequenceRanks, given: Topology | None, placement: str, profile: Profile | None
) -> GroupPlacement:
    """Return where Ulysses groups and rings are placed on the machine.

    Args:
        ranks: ranks that share a sequence.
        given: topology set by the user, of a Ulysses group or of all ranks; None uses the detected one.
        placement: placement of the ring, one of PLACEMENTS.
        profile: link profile given by the user. One that covers all ranks is divided between both parts if these align
            with its axes; another one counts as that of a Ulysses group.
    """
    if ranks.ring == 1:
        return GroupPlacement(topology=given or ranks.topology, ring=placement, profile=profile)
    full = given if given and given.size == ranks.count else ranks.topology
    split = UlyssesRingSplit(ranks.ulysses, ranks.ring, placement)
    topology, ring_topology = split.ulysses_topology(full), split.ring_topology(full)
    ring_profile = None
    if given not in (None, full):  # of a Ulysses group
        topology = given
    elif profile and profile.topology == full and split.fits(full):
        ring_profile = profile.restrict_to(ring_topology)
        profile = profile.restrict_to(topology) if ranks.ulysses > 1 else None
    return GroupPlacement(
        topology=topology, ring=placement, ring_topology=ring_topology, profile=profile, ring_profile=ring_profile
    )


def spans_nodes(topology: Topology) -> bool:
    """Return whether a topology spans several nodes."""
    return any(axis.name == AXIS_NAMES[0] and axis.size > 1 for axis in topology.axes)
