"""The cost of coding a layer on an accelerator: link time that it saves, against host time that it adds.

Kernels of the codecs are short, so that the host may take longer to launch them than the device to run them. Where
layers are short too, the device then waits for the host, and a lossy step is slower than a lossless one.
"""

import math
from dataclasses import dataclass

from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.planner import CODED_RATIO, divide_axes


@dataclass(frozen=True)
class CodingCost:
    """Figures that decide whether a layer is coded, the same on every rank of the run."""

    link_seconds_per_byte: float
    """Link time of a byte that crosses the slow axes, in seconds."""
    host_seconds_per_tensor: float
    """Host time that encoding and decoding a tensor adds, in seconds; 0 if unknown."""

    @classmethod
    def of(cls, profile: Profile, slow_axes: tuple[str, ...]) -> "CodingCost":
        """Return the cost by a link profile.

        Bytes for other coordinates cross the slow axes one after the other. Of b bytes of a rank, (N - 1) / N b cross
        them, with N coordinates on all of them, and (n - 1) / n b cross each of its n coordinates.

        Args:
            profile: link profile of all axes.
            slow_axes: names of the slow axes; one of them has several ranks.
        """
        slow, _ = divide_axes(profile, slow_axes)
        assert slow
        pairs = zip(slow.links, slow.topology.axes, strict=True)
        per_byte = sum((axis.size - 1) / axis.size / link.bytes_per_second for link, axis in pairs)
        crossing = 1 - 1 / math.prod(slow.topology.shape)
        return cls(per_byte / crossing, profile.coding_host_seconds)

    def saved_link_seconds(self, crossing_bytes: float) -> float:
        """Return the link time that coding saves in a layer.

        Args:
            crossing_bytes: bytes that a rank sends across the slow axes without codecs.
        """
        return (1 - CODED_RATIO) * crossing_bytes * self.link_seconds_per_byte

    def added_host_seconds(self, num_tensors: int) -> float:
        """Return the host time that coding adds to a layer, of which so many tensors are coded."""
        return num_tensors * self.host_seconds_per_tensor
