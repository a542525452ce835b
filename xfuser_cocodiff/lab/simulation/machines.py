"""Machines that the simulator knows on paper: links, collectives and arithmetic, each figure with its source.

A figure without a published source says "assumed".
"""

import itertools
import math
from dataclasses import dataclass

from xfuser_cocodiff.engine.topology.link_profile import AxisLink, Profile
from xfuser_cocodiff.engine.topology.topology import Topology

NODE = "node"
_CODEC_COPIES = 4
"""Assumed: copies of values that take as long as a codec in one kernel at each end."""


@dataclass(frozen=True)
class Machine:
    """A cluster of equal nodes; a rank is a GPU, or one tile of a GPU."""

    name: str
    inside: tuple[tuple[str, int], ...]
    """Axes within a node and their sizes, outermost first."""
    links: tuple[AxisLink, ...]
    """One per axis, the one between nodes included."""
    launch_seconds: float
    """What a collective costs before its first message leaves."""
    copy_bytes_per_second: float
    """Speed at which a rank reorders a message: half of its memory's speed, since it reads and writes."""
    peak_flops: float
    """Dense bf16 FLOP/s of a rank."""
    efficiency: float
    """Share of the peak that a whole transformer layer reaches, norms and RoPE included."""
    contention: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    """How many times longer links take when a collective drives several axes at once, by bytes that a rank holds:
    linear in the logarithm between these points, constant beyond them."""
    contention_across_nodes: float = 1.0
    """By how much more that grows when such a collective crosses nodes."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a node."""
        return math.prod(size for _, size in self.inside)

    @property
    def flops(self) -> float:
        """FLOP/s that a rank reaches."""
        return self.peak_flops * self.efficiency

    def topology(self, nodes: int) -> Topology:
        """Return the topology of so many nodes, with all their ranks."""
        return Topology.named(**({NODE: nodes} if nodes > 1 else {}), **dict(self.inside))

    def over(self, topology: Topology, message_bytes: float) -> Profile:
        """Return what the planner would know of some ranks.

        Args:
            topology: theirs.
            message_bytes: what a rank holds before an all-to-all; contention depends on it.

        Raises:
            KeyError: the topology has an axis that the machine has not.
        """
        by_name = {link.name: link for link in self.links}
        links = tuple(by_name[axis.name] for axis in topology.axes)
        across = any(axis.name == NODE and axis.size > 1 for axis in topology.axes)
        contention = self.contention_at(message_bytes) * (self.contention_across_nodes if across else 1)
        return Profile(
            topology,
            links,
            self.launch_seconds,
            self.copy_bytes_per_second,
            self.copy_bytes_per_second / _CODEC_COPIES,
            contention,
        )

    def contention_at(self, message_bytes: float) -> float:
        """Contention within a node for messages of this size."""
        points = self.contention
        if message_bytes <= points[0][0]:
            return points[0][1]
        for (low, start), (high, end) in itertools.pairwise(points):
            if message_bytes <= high:
                return start + (end - start) * math.log(message_bytes / low) / math.log(high / low)
        return points[-1][1]


AURORA = Machine(
    "aurora",
    (("gpu", 6), ("tile", 2)),
    (
        # Eight Slingshot cards of 25 GB/s for twelve tiles (ALCF, "Aurora Machine Overview"; the CoCoDiff paper).
        # Latency: 467 us for 4 KiB to each of 383 peers, 12 ranks a node (pmodels/mpich#7601), is 1.2 us a peer, of
        # which 0.25 us are bytes.
        AxisLink(NODE, 1e-6, 8 * 25e9 / 12),
        # 15 GB/s between a pair of GPUs (ALCF; the paper). How fast all pairs are together is not published. Read here
        # as one peer after the other, the two tiles of a GPU sharing the link: 7.5 GB/s a tile. All five links at once
        # would be 75 GB/s, and the paper's hierarchical all-to-all of 48 MB would take 0.9 ms instead of 6.0.
        # Latency assumed.
        AxisLink("gpu", 1e-6, 15e9 / 2),
        # Between the tiles of a GPU (ALCF: 158 to 185 GB/s; the paper: 185). Latency assumed.
        AxisLink("tile", 1e-6, 185e9),
    ),
    launch_seconds=42e-6,  # per collective whatever its size, on Arc B70
    copy_bytes_per_second=1e12 / 2,  # triad on one tile (ALCF, "Node Performance Overview")
    peak_flops=256e12,  # bf16, one tile (ALCF)
    efficiency=0.4,  # assumed: no figure for a diffusion transformer is published
    # Fitted to three of the paper's figures for oneCCL's flat all-to-all: on 12 ranks 1.1 times TAPA's time at 6 MB,
    # and 25.5 ms at 48 MB; and a mean gain of TAPA of 2.2 on several nodes. No other figure is fitted.
    contention=((6e6, 1.21), (48e6, 4.77)),
    contention_across_nodes=4.5,
)

DGX_H100 = Machine(
    "dgx-h100",
    (("gpu", 8),),
    (
        # One 400 Gbit/s card a GPU: 48 to 49 GB/s, which an all-to-all cannot share (NVIDIA/nccl-tests#267).
        AxisLink(NODE, 1e-6, 48e9),  # latency assumed
        # Fourth NVLink through NVSwitch: 450 GB/s, of which NCCL can use 370 (NVIDIA/nccl-tests#212).
        AxisLink("gpu", 0.5e-6, 370e9),  # latency assumed
    ),
    launch_seconds=18e-6,  # assumed: NCCL's small collectives take 15 to 20 us
    copy_bytes_per_second=3.35e12 / 2,  # NVIDIA, "H100": HBM3
    peak_flops=989e12,  # NVIDIA, "H100 SXM", bf16 dense
    efficiency=0.45,  # assumed: less than on a slower GPU, which is easier to keep busy
)  # contention 1: NVLink and network cards share nothing, and NCCL aggregates what goes to one node (PXN)

PCIE = Machine(
    "pcie",
    (("gpu", 2), ("tile", 4)),  # two sockets of four GPUs: a `tile` is a GPU here, and a `gpu` a socket
    (
        # One 100 Gbit/s card for the eight GPUs of a box.
        AxisLink(NODE, 10e-6, 12.5e9 / 8),  # latency assumed: sockets of the kernel
        # Two UPI links of 20.8 GB/s (Intel, Xeon Scalable at 10.4 GT/s) for four GPUs.
        AxisLink("gpu", 3e-6, 2 * 20.8e9 / 4),  # latency assumed
        # A PCIe 4.0 x16 slot carries 31.5 GB/s (PCI-SIG: 16 GT/s, 128b/130b), 26 after headers (assumed), for all peers
        # together.
        AxisLink("tile", 2e-6, 26e9),  # latency assumed
    ),
    launch_seconds=18e-6,  # assumed, as above
    copy_bytes_per_second=864e9 / 2,  # NVIDIA, "L20"
    peak_flops=119.5e12,  # NVIDIA, "L20", bf16 dense
    # FLUX.1-dev, 1024 px, 28 steps in 24.94 s on one L20 (xlite-dev/flux-faster), by the FLOPs counted here.
    efficiency=0.70,
)  # contention 1: a slot that carries 7 shares is still done before the four that cross UPI

ETHERNET = Machine(
    "ethernet",
    (("gpu", 8),),
    (
        # One 100 Gbit/s card for the eight GPUs of a node.
        AxisLink(NODE, 10e-6, 12.5e9 / 8),  # latency assumed: sockets of the kernel
        # Third NVLink through NVSwitch: 300 GB/s (NVIDIA, "A100"), of which NCCL can use 80 % as on an H100 (assumed).
        AxisLink("gpu", 0.5e-6, 240e9),  # latency assumed
    ),
    launch_seconds=18e-6,  # assumed, as above
    copy_bytes_per_second=2.04e12 / 2,  # NVIDIA, "A100 80GB": HBM2e
    peak_flops=312e12,  # NVIDIA, "A100", bf16 dense
    efficiency=0.55,  # assumed: between L20 and H100
)

MACHINES = {machine.name: machine for machine in (AURORA, DGX_H100, PCIE, ETHERNET)}
