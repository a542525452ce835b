"""Published link rates of machines, which emulated clusters scale down by a common factor."""

from collections.abc import Mapping
from dataclasses import dataclass

SLOWDOWN = 1e-4
"""Rate of an emulated link divided by the real rate, at scale 1."""
MEGABITS = 8000
"""Mbit/s per GB/s."""


@dataclass(frozen=True)
class Preset:
    """Link rates of a machine."""

    topology: str
    """Topology of eight ranks of the machine."""
    gigabytes: Mapping[str, float]
    """GB/s in one direction, by axis."""

    def rates(self, axes: list[str]) -> dict[str, float]:
        """Return the rates of emulated links along these axes, Mbit/s at scale 1."""
        return {axis: self.gigabytes[axis] * MEGABITS * SLOWDOWN for axis in axes}


PRESETS = {
    # Aurora. 185 GB/s between the two tiles of a Max 1550 and 15 GB/s over Xe Link between each two GPUs: measured
    # point to point, as in ALCF's "Node Performance Overview" and the CoCoDiff paper. A node has eight Slingshot cards
    # of 25 GB/s for its twelve tiles (ALCF, "Aurora Machine Overview").
    "aurora": Preset("node=2,gpu=2,tile=2", {"tile": 185, "gpu": 15, "node": 8 * 25 / 12}),
    # Eight GPUs in one box of two sockets, without NVLink or peer access. `node` is a socket: two UPI links of
    # 10.4 GT/s carry 20.8 GB/s each (Intel, Xeon Scalable), for four GPUs. A PCIe 4.0 x16 slot carries 31.5 GB/s
    # (PCI-SIG: 16 GT/s, 128b/130b), which the three neighbors of a GPU share in an all-to-all. `tile` is a pair with
    # an NVLink bridge, as of RTX A6000: 56.25 GB/s (NVIDIA, "Ampere GA102 GPU Architecture").
    "sockets": Preset("node=2,gpu=4", {"tile": 56.25, "gpu": 31.5 / 3, "node": 2 * 20.8 / 4}),
    # Nodes of four A100, each pair of them on four NVLinks of 25 GB/s (NVIDIA, "Introducing HGX A100": the board of
    # four), and one 100 Gbit/s Ethernet card, 12.5 GB/s, for the four. `tile` are the two dies of an MI250X, on four
    # links of 50 GB/s (AMD, "CDNA 2 Architecture").
    "ethernet": Preset("node=2,gpu=4", {"tile": 4 * 50, "gpu": 4 * 25, "node": 12.5 / 4}),
}
