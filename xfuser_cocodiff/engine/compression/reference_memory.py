"""Memory that references take, and what is done where they may not take so much.

Both ends of a slow link hold what the receiver was given last of every value that crosses it, and what it was given
before that where the change is extrapolated. A budget is met in two ways: references are kept in 8 bits, and if that is
not enough, the layers that are met last in a step travel exactly, for which nothing is kept. All layers save alike for
what they hold, and which of them were exact made no difference to the pictures of the small trained model; so it is the
order that decides. That needs no forecast: each layer asks for room when it is met, for all that it is going to hold.
"""

from fractions import Fraction
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.compression.codecs import CHANGE
from xfuser_cocodiff.engine.compression.modes import CodecSchedule

GIB = 2**30


class LayerSizes(NamedTuple):
    """What a rank has of a layer's Q, K, V and O in one call."""

    values: int
    """In all four."""
    value: int
    """In V."""
    head_dim: int
    value_bytes: int

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        fraction: Fraction = Fraction(1),
    ) -> "LayerSizes":
        """Of tensors (B, H, S, D) in one call.

        Args:
            query: Q.
            key: K, perhaps of other tokens than Q, such as text beside them.
            value: V.
            fraction: share of the tensors that counts; below 1 where a rank simulates others.
        """
        values = 2 * query.numel() + key.numel() + value.numel()  # O is of the shape of all queries
        return cls(int(values * fraction), int(value.numel() * fraction), value.shape[-1], value.element_size())

    def crossing(self, places: int) -> "LayerSizes":
        """What of it crosses slow axes with so many places."""
        return self._replace(
            values=self.values * (places - 1) // places,
            value=self.value * (places - 1) // places,
        )

    def crossing_bytes(self, places: int, ring_places: int) -> int:
        """What this rank sends across slow axes as it is, in a Ulysses group and, K and V alone, in a ring."""
        return (self.crossing(places).values + 2 * self.value * (ring_places - 1)) * self.value_bytes


class ReferenceBytes(NamedTuple):
    """Bytes that the references of a layer take on a rank, in one branch."""

    full: int
    compact: int
    """In 8 bits."""

    @classmethod
    def of(cls, share: LayerSizes, schedule: CodecSchedule, places: int, ring_places: int = 1) -> "ReferenceBytes":
        """For what a rank has of the layer, so many places on slow axes of its Ulysses group, and of its ring.

        In a group it sends as much as it gets, and holds both. In a ring it holds its own K and V, and the same of one
        rank at each other place.
        """
        crossing = share.crossing(places)
        around = 2 * share.value * ring_places if ring_places > 1 else 0
        held = (2 if schedule.predictor else 1) * (2 * crossing.values + around)
        seen = crossing.value * share.value_bytes if schedule.score == CHANGE and any(schedule.cached) else 0
        scales = held // share.head_dim  # a byte for each row
        return cls(held * share.value_bytes + seen, held + scales + seen)
