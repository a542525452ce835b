"""Where Ulysses and where the ring lie: which of the two joins neighbouring ranks, and which the ranks far apart.

The ranks that share a sequence are numbered along the machine. xDiT makes Ulysses groups of neighbouring ranks, so that
the ring crosses the slowest axis: `outer`. The other way round, `inner`, the ring joins neighbours, and Ulysses groups
stride over the machine. Every rank keeps its part of the sequence either way: only the order differs in which it meets
the K and V of the others.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from xfuser_cocodiff import planner
from xfuser_cocodiff.modes import CodecSchedule
from xfuser_cocodiff.profile import Profile
from xfuser_cocodiff.topology import AXIS_NAMES, Topology

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


class LayerBytes(NamedTuple):
    """What a rank holds of the tensors of a layer."""

    qkv: float
    o: float
    kv: float


def exchange_seconds(profile: Profile, split: Split, held: LayerBytes, coded: LayerBytes | None = None) -> float:
    """Predicted time of a layer's all-to-alls, one with Q, K and V and one with O.

    Args:
        profile: of all ranks.
        split: one that fits it.
        held: what a rank holds.
        coded: what of it goes along slow axes; None where everything travels as it is.
    """
    if split.ulysses == 1:
        return 0.0
    part = profile.along(split.ulysses_topology(profile.topology))
    payloads = (coded.qkv, coded.o) if coded else (None, None)
    messages = zip((held.qkv, held.o), payloads, strict=True)
    return sum(planner.exchange_seconds(part, message, payload) for message, payload in messages)


def ring_seconds(profile: Profile, split: Split, held: LayerBytes) -> float:
    """Predicted time in which every rank of a ring gets the K and V of a layer from all others.

    PyTorch's ring, which xDiT runs, gathers them by one collective, behind the first block of attention.
    """
    if split.ring == 1:
        return 0.0
    return planner.gather_seconds(profile.along(split.ring_topology(profile.topology)), held.kv)


def choose(profile: Profile, ulysses: int, ring: int, mode_of: Callable[[Topology], CodecSchedule | None]) -> str:
    """The placement whose communication takes less time: xDiT's own where the other one does not promise to save
    planner.MARGIN, or does not lie on the axes.

    How much of it hides behind computation is not counted: before groups are made, nobody knows the model.

    Args:
        profile: of all ranks.
        ulysses: Ulysses degree.
        ring: ring degree.
        mode_of: how the exchanges of Ulysses groups with a topology are coded; None where they are not.
    """
    one = math.prod(TYPICAL_SHAPE) * torch.bfloat16.itemsize
    held = LayerBytes(qkv=3 * one, o=one, kv=2 * one)

    def seconds(split: Split) -> float:
        schedule = mode_of(split.ulysses_topology(profile.topology))
        coded = schedule and LayerBytes(_coded("qkv", schedule), _coded("o", schedule), held.kv)
        return exchange_seconds(profile, split, held, coded) + ring_seconds(profile, split, held)

    outer, inner = (Split(ulysses, ring, placement) for placement in PLACEMENTS)
    if not all(split.fits(profile.topology) for split in (outer, inner)):
        return INNER if inner.fits(profile.topology) else OUTER
    return INNER if seconds(inner) < (1 - planner.MARGIN) * seconds(outer) else OUTER


def _coded(names: str, schedule: CodecSchedule) -> float:
    shapes = [TYPICAL_SHAPE] * len(names)
    return statistics.fmean(schedule.sent_bytes(names, shapes, torch.bfloat16, TYPICAL_STEPS))


def has_nodes(topology: Topology) -> bool:
    """Whether ranks lie on several nodes."""
    return any(axis.name == AXIS_NAMES[0] and axis.size > 1 for axis in topology.axes)
