"""Where Ulysses and where the ring lie: which of the two joins neighbouring ranks, and which the ranks far apart.

The ranks that share a sequence are numbered along the machine. xDiT makes Ulysses groups of neighbouring ranks, so that
the ring crosses the slowest axis: `outer`. The other way round, `inner`, the ring joins neighbours, and Ulysses groups
stride over the machine. Every rank keeps its part of the sequence either way: only the order differs in which it meets
the K and V of the others.
"""

import math
import statistics
from dataclasses import dataclass

import torch

from xfuser_cocodiff.codec.modes import CodecSchedule
from xfuser_cocodiff.machine import planner
from xfuser_cocodiff.machine.profile import Profile
from xfuser_cocodiff.machine.topology import AXIS_NAMES, Topology

OUTER, INNER = PLACEMENTS = ("outer", "inner")
"""Where the ring lies; outer is xDiT's own."""
TYPICAL_SHAPE, TYPICAL_STEPS = (1, 1, 24, 576, 128), 50
"""Of Q on a rank (L, G, H, T, D), and of a run, where they are not known yet: FLUX.1-dev at 1024 pixels on 8 ranks. At
such sizes bandwidth decides."""


@dataclass(frozen=True)
class Split:
    """How the ranks of a sequence-parallel group are parted."""

    ulysses: int
    """Ulysses degree."""
    ring: int
    """Ring degree."""
    placement: str = OUTER

    def ulysses_topology(self, whole: Topology) -> Topology:
        """Topology of a Ulysses group, given that of all ranks."""
        return whole.strided(self.ulysses) if self.placement == INNER else whole.neighbouring(self.ulysses)

    def ring_topology(self, whole: Topology) -> Topology:
        """Topology of a ring, given that of all ranks."""
        return whole.neighbouring(self.ring) if self.placement == INNER else whole.strided(self.ring)

    def fits(self, whole: Topology) -> bool:
        """Whether every Ulysses group, and every ring, lies on the axes as the others do."""
        known = {axis.name for axis in whole.axes}
        parts = self.ulysses_topology(whole), self.ring_topology(whole)
        return all({axis.name for axis in part.axes if axis.size > 1} <= known for part in parts)


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a sequence, as the launcher has them."""

    ulysses: int
    """Ulysses degree."""
    detected: Topology
    """Of so many neighbouring ranks: it is used when none is given, and tells whether these lie on several nodes."""
    ring: int = 1
    """Ring degree."""
    detected_whole: Topology | None = None
    """Of all ranks of both; None without a ring."""

    @property
    def whole(self) -> int:
        """Number of ranks."""
        return self.ulysses * self.ring


@dataclass(frozen=True)
class Ground:
    """Where the Ulysses groups of a run lie."""

    topology: Topology
    detected: Topology
    """What the launcher tells of them."""
    ring: str = OUTER
    """Where the ring lies."""
    profile: Profile | None = None
    """Of their axes, where one of all ranks is known."""
    ring_topology: Topology | None = None
    """Of the ring; None where there is none."""
    ring_profile: Profile | None = None
    """Of its axes, where one of all ranks is known."""
    undecided: Topology | None = None
    """Of all ranks, where the ring lies as xDiT's only because nothing is known of their links; else None."""


def settle(
    ranks: Ranks,
    given: Topology | None,
    wanted: str | None,
    profile: Profile | None,
    schedule: CodecSchedule | None,
) -> Ground:
    """Settle where Ulysses groups and rings lie. All ranks that are given the same find the same.

    Args:
        ranks: those that share a sequence.
        given: topology that the user gave, of a Ulysses group or of all ranks.
        wanted: placement that the user wants; None leaves it to the profile.
        profile: what is known of links; it decides if it is of all ranks.
        schedule: how what crosses slow axes is encoded; None where it is not.

    Raises:
        ValueError: the groups do not lie on the axes of the profile.
    """
    if ranks.ring == 1:
        return Ground(given or ranks.detected, ranks.detected)
    assert ranks.detected_whole  # there is a ring
    whole = given if given and given.size == ranks.whole else ranks.detected_whole
    known = profile if profile and profile.topology == whole and given in (None, whole) else None
    if ranks.ulysses == 1:
        return Ground(ranks.detected, ranks.detected_whole, OUTER, None, whole, known)
    ring = wanted or (choose(known, ranks.ulysses, ranks.ring, schedule) if known else OUTER)
    split = Split(ranks.ulysses, ranks.ring, ring)
    if known and not split.fits(whole):
        raise ValueError(
            f"{ring!r} is not valid: groups of {ranks.ulysses} and rings of {ranks.ring} ranks do not lie alike on the "
            f"axes of the profile, {whole}"
        )
    detected = ranks.detected if ring == OUTER else split.ulysses_topology(ranks.detected_whole)
    around = split.ring_topology(whole)
    if given not in (None, whole):
        return Ground(given, detected, ring, ring_topology=around)
    topology = split.ulysses_topology(whole) if given or known else detected
    if not known:
        return Ground(topology, detected, ring, ring_topology=around, undecided=None if wanted or profile else whole)
    return Ground(topology, detected, ring, known.along(topology), around, known.along(around))


def choose(profile: Profile, ulysses: int, ring: int, schedule: CodecSchedule | None) -> str:
    """The placement whose communication takes less time: xDiT's own where the other one does not promise to save
    planner.MARGIN, or does not lie on the axes.

    How much of it hides behind computation is not counted: before groups are made, nobody knows the model.

    Args:
        profile: of all ranks.
        ulysses: Ulysses degree.
        ring: ring degree.
        schedule: how what crosses slow axes is encoded; None where it is not.
    """
    outer, inner = (Split(ulysses, ring, placement) for placement in PLACEMENTS)
    if not all(split.fits(profile.topology) for split in (outer, inner)):
        return INNER if inner.fits(profile.topology) else OUTER
    took = [_seconds(profile, split, schedule) for split in (outer, inner)]
    return INNER if took[1] < (1 - planner.MARGIN) * took[0] else OUTER


def _seconds(profile: Profile, split: Split, schedule: CodecSchedule | None) -> float:
    """Of the communication of a layer of typical size."""
    one, total = math.prod(TYPICAL_SHAPE) * torch.bfloat16.itemsize, 0.0
    if split.ulysses > 1:
        part = profile.along(split.ulysses_topology(profile.topology))
        at_once = schedule is not None and planner.goes_at_once(part, 2 * one)
        for names in ("qkv", "o"):
            payload = _payload_bytes(names, schedule) if schedule else None
            total += planner.exchange_seconds(part, len(names) * one, payload, at_once)
    if split.ring > 1:
        part = profile.along(split.ring_topology(profile.topology))
        total += planner.ring_seconds(part, 2 * one, _payload_bytes("kv", schedule) if schedule else None)
    return total


def _payload_bytes(names: str, schedule: CodecSchedule) -> float:
    shapes = [TYPICAL_SHAPE] * len(names)
    return statistics.fmean(schedule.sent_bytes(names, shapes, torch.bfloat16, TYPICAL_STEPS))


def has_nodes(topology: Topology) -> bool:
    """Whether ranks lie on several nodes."""
    return any(axis.name == AXIS_NAMES[0] and axis.size > 1 for axis in topology.axes)
