"""Provides known clusters: their links, collectives and accelerators, each figure with its source.

Figures without a published source are marked "assumed". Rates are those of a rank while all ranks send.
"""

import itertools
import math
from dataclasses import dataclass, replace

from xfuser_cocodiff.engine.topology.link_profile import AxisLink, Profile
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.accelerator.accelerators import (
    A100,
    ARC_B60,
    H100,
    L20,
    MAX_1550_TILE,
    ONECCL_SECONDS,
    Accelerator,
)

NODE = "node"
_CODEC_COPIES = 4
"""Assumed cost of a fused codec kernel on both ends of a link, in copies of the values."""


@dataclass(frozen=True)
class Machine:
    """Cluster of equal nodes. A rank is a GPU, or one tile of a GPU."""

    name: str
    node_axes: tuple[tuple[str, int], ...]
    """Names and sizes of the axes within a node, outermost first."""
    links: tuple[AxisLink, ...]
    """Links of each axis, including `node`."""
    launch_seconds: float
    """Time of a collective before its first message is sent, in seconds."""
    accelerator: Accelerator
    """Device of a rank."""
    contention: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    """Slowdown of the links while a collective uses several axes at once, as points (bytes per rank, factor). Factors
    are interpolated linearly in the logarithm of the bytes, and constant beyond the points."""
    internode_contention: float = 1.0
    """Further factor on `contention` for collectives that cross nodes."""

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of a node."""
        return math.prod(size for _, size in self.node_axes)

    def topology(self, nodes: int) -> Topology:
        """Return the topology of all ranks of some nodes."""
        return Topology.named(**({NODE: nodes} if nodes > 1 else {}), **dict(self.node_axes))

    def link_profile(self, topology: Topology, message_bytes: float) -> Profile:
        """Return the link profile of some ranks.

        Args:
            topology: topology of the ranks.
            message_bytes: bytes per rank before an all-to-all, which determine the contention.

        Raises:
            KeyError: the topology has an axis that the machine does not have.
        """
        by_name = {link.name: link for link in self.links}
        links = tuple(by_name[axis.name] for axis in topology.axes)
        crosses_nodes = any(axis.name == NODE and axis.size > 1 for axis in topology.axes)
        contention = self.contention_at(message_bytes) * (self.internode_contention if crosses_nodes else 1)
        copied = self.accelerator.copied_bytes_per_second
        return Profile(topology, links, self.launch_seconds, copied, copied / _CODEC_COPIES, contention)

    def contention_at(self, message_bytes: float) -> float:
        """Return the contention factor within a node for messages of this size."""
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
        # Latency: 467 us for 4 KiB to each of 383 peers with 12 ranks per node (pmodels/mpich#7601) is 1.2 us per peer,
        # of which 0.25 us transfer the bytes.
        AxisLink(NODE, 1e-6, 8 * 25e9 / 12),
        # 15 GB/s between a pair of GPUs (ALCF; the paper). The rate of all pairs together is not published. Assumed
        # here: one peer at a time, and both tiles of a GPU share the link, which is 7.5 GB/s per tile. With all five
        # links at once, 75 GB/s, the paper's hierarchical all-to-all of 48 MB would take 0.9 ms instead of 6.0 ms.
        # Latency assumed.
        AxisLink("gpu", 1e-6, 15e9 / 2),
        # Between the tiles of a GPU, 269 GB/s in both directions together (ALCF, "Node Performance Overview"; 185 in
        # one direction alone). Latency assumed.
        AxisLink("tile", 1e-6, 269e9 / 2),
    ),
    launch_seconds=ONECCL_SECONDS,
    accelerator=MAX_1550_TILE,
    # Fitted to three of the paper's figures for oneCCL's flat all-to-all: on 12 ranks 1.1 times TAPA's time at 6 MB and
    # 25.5 ms at 48 MB; on several nodes a mean speedup of TAPA of 2.2x. No other figure is fitted.
    contention=((6e6, 1.21), (48e6, 4.77)),
    internode_contention=4.5,
)

DGX_H100 = Machine(
    "dgx-h100",
    (("gpu", 8),),
    (
        # One 400 Gbit/s card per GPU: 48 to 49 GB/s. An all-to-all uses a GPU's own card only (NVIDIA/nccl-tests#267).
        AxisLink(NODE, 1e-6, 48e9),  # latency assumed
        # NVLink 4 through NVSwitch: 450 GB/s, of which NCCL reaches 370 (NVIDIA/nccl-tests#212).
        AxisLink("gpu", 0.5e-6, 370e9),  # latency assumed
    ),
    launch_seconds=18e-6,  # assumed: NCCL's small collectives take 15 to 20 us
    accelerator=H100,
)  # contention 1: NVLink and network cards are independent, and NCCL aggregates messages to a node (PXN)

_TCP = 1448 / 1538
"""Fraction of an Ethernet link that carries data: TCP in frames of 1500 bytes."""

PCIE = Machine(
    "pcie",
    (("gpu", 2), ("tile", 4)),  # two sockets with four GPUs each: `tile` is a GPU here, and `gpu` a socket
    (
        # One 100 Gbit/s card for all eight GPUs of a box.
        AxisLink(NODE, 10e-6, _TCP * 12.5e9 / 8),  # latency assumed: TCP sockets of the kernel
        # Two UPI links of 20.8 GB/s (Intel, Xeon Scalable at 10.4 GT/s) for four GPUs.
        AxisLink("gpu", 3e-6, 2 * 20.8e9 / 4),  # latency assumed
        # A PCIe 4.0 x16 slot has 31.5 GB/s (PCI-SIG: 16 GT/s, 128b/130b), 26 after headers (assumed), for all peers.
        # Without peer access every block passes through host memory: it leaves one slot and enters another, which
        # PCIe's two directions carry at once.
        AxisLink("tile", 2e-6, 26e9),  # latency assumed
    ),
    launch_seconds=18e-6,  # assumed, as above
    accelerator=L20,
)  # contention 1: a slot sends its 7 parts in less time than UPI needs for four

ETHERNET_100 = Machine(
    "ethernet-100",
    (("gpu", 8),),
    (
        # One 100 Gbit/s card for all eight GPUs of a node.
        AxisLink(NODE, 10e-6, _TCP * 12.5e9 / 8),  # latency assumed: TCP sockets of the kernel
        # NVLink 3 through NVSwitch: 300 GB/s (NVIDIA, "A100"), of which NCCL reaches 80 % as on an H100 (assumed).
        AxisLink("gpu", 0.5e-6, 240e9),  # latency assumed
    ),
    launch_seconds=18e-6,  # assumed, as above
    accelerator=A100,
)

ETHERNET_25 = replace(
    ETHERNET_100,
    name="ethernet-25",
    links=(AxisLink(NODE, 10e-6, _TCP * 3.125e9 / 8), *ETHERNET_100.links[1:]),  # one 25 Gbit/s card per node
)

ARC_B60_BOX = Machine(
    "arc-b60",
    (("gpu", 8),),  # eight GPUs in a box of two sockets (Intel, "Project Battlematrix")
    (
        # One 100 Gbit/s card for all eight GPUs of a box (assumed).
        AxisLink(NODE, 10e-6, _TCP * 12.5e9 / 8),  # latency assumed: TCP sockets of the kernel
        # A PCIe 5.0 x8 slot has 28.4 GB/s after headers (ai-dynamo/aiconfigurator, systems/b60.yaml), for all peers.
        # Assumed: 0.8 of it through host memory. UPI of these Xeons (four links of 24 GT/s) carries more than that.
        AxisLink("gpu", 2e-6, 0.8 * 28.4e9),  # latency: ai-dynamo/aiconfigurator, as above
    ),
    launch_seconds=ONECCL_SECONDS,
    accelerator=ARC_B60,
)

MACHINES = {machine.name: machine for machine in (AURORA, DGX_H100, PCIE, ETHERNET_25, ETHERNET_100, ARC_B60_BOX)}
"""Clusters by name."""
