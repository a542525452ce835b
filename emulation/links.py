"""The links of an emulated cluster: which ranks share a link, its rate, and the `tc` commands that shape it.

A link belongs to the rank that sends on it and is shared by its traffic to all ranks that it leads to:

======  ==========================================================================
axis    links of one rank
======  ==========================================================================
tile    one to every other tile of its GPU
gpu     one to every other GPU of its node, shared by that GPU's tiles
node    one to all other nodes together: the rank's share of the network cards of its node
flat    one to all other ranks: a port
======  ==========================================================================

Rates are TCP goodput in Mbit/s. Latency is not emulated: it is that of this machine, 0.05 to 0.1 ms.
"""

import dataclasses
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xfuser_cocodiff.engine.topology.launcher import CLUSTER_VARIABLE
from xfuser_cocodiff.engine.topology.topology import FLAT, Topology

INTERFACE = "eth0"

MIN_RATE, MAX_RATE = 0.1, 10_000.0
"""Valid rates, Mbit/s: below, a packet exceeds TCP's retransmission timeout; above, shaping has no effect."""

# Measured between two ranks on two cores of an AMD EPYC: rates of 1 to 500 Mbit/s are accurate to 3 % (1000 to 6 %). A
# message of 16 KiB takes 0.95 of bytes / rate up to 40 Mbit/s, one of 64 KiB at least 0.8 up to 500 Mbit/s. Smaller
# messages take less than that, because a shaper charges for a packet after it was sent.
#
# Packets of 0.25 ms limit the CPU cost of a link to 4000 packets a second at any rate. Slow links have packets of 1500
# bytes: smaller ones lose more to headers, larger ones make short messages free. Segmentation offload is off: it hands
# the shaper packets of up to 64 KiB, so that messages of 16 KiB would take no time at any rate.
PACKET_SECONDS = 250e-6
# On oversubscribed cores, shaping small packets takes as much CPU time as the ranks do, and links miss their rates:
# 24 ranks on two cores reach 0.94 of it, and 0.98 with packets of the maximum size.
CROWDED_PACKET_SECONDS = 8e-3
CROWD = 8
"""Ranks per core up to which packets stay small."""
MIN_PACKET, MAX_PACKET = 1500, 16_000
ETHERNET_HEADER, TCP_HEADERS = 14, 52
# An all-to-all sends both ways, and every second packet is acknowledged on the link of the other direction.
ACKNOWLEDGEMENT_SHARE = (ETHERNET_HEADER + TCP_HEADERS) / 2
# No packet is ever lost, but packets wait longer in a link's queue than TCP's usual 200 ms. TCP would send them again.
RETRANSMISSION_SECONDS = 60
# Token bucket: how much a link may catch up after a late timer, which would otherwise cost throughput. An idle link
# sends this much for free.
BURST_SECONDS = 250e-6


@dataclass(frozen=True)
class Link:
    """A link that one rank sends on."""

    axis: str
    ranks: tuple[int, ...]
    """Ranks that the link leads to and that share it."""


@dataclass(frozen=True)
class Cluster:
    """An emulated cluster: its topology and the rates of its links."""

    topology: Topology
    rates: Mapping[str, float]
    """Mbit/s of every axis; a rate for ``flat`` alone gives each rank a single port."""
    preset: str | None = None
    scale: float = 1.0
    """Factor that the rates of the preset were multiplied by."""
    packet_seconds: float = PACKET_SECONDS
    """Transfer time of a packet on its link, within the limits of packet sizes."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.topology.size

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return next((axis.size for axis in self.topology.axes if axis.name == "node"), 1)

    def packet_bytes(self, axis: str) -> int:
        """Return the size of IP packets on a link along an axis."""
        return min(max(round(self.rates[axis] * 1e6 / 8 * self.packet_seconds), MIN_PACKET), MAX_PACKET)

    def links(self, rank: int) -> tuple[Link, ...]:
        """Return the links that a rank sends on, ordered by the first rank that each leads to."""
        shared: dict[tuple, list[int]] = {}
        own = self.topology.coordinates(rank)
        for peer in range(self.size):
            if peer != rank:
                shared.setdefault(self._link_key(own, self.topology.coordinates(peer)), []).append(peer)
        return tuple(Link(key[0], tuple(ranks)) for key, ranks in shared.items())

    def _link_key(self, own: Sequence[int], peer: Sequence[int]) -> tuple:
        """Return the axis of the link between two coordinates, and what distinguishes it from others of that axis."""
        if FLAT in self.rates:
            return (FLAT,)
        axis, place = next((a.name, p) for a, o, p in zip(self.topology.axes, own, peer, strict=True) if o != p)
        return (axis,) if axis == "node" else (axis, place)

    def to_json(self) -> str:
        """Return the value of the environment variable that describes the cluster to its ranks and their records."""
        counts = {"ranks": self.size, "nodes": self.num_nodes}
        return json.dumps({**dataclasses.asdict(self), "topology": str(self.topology), **counts})


def packet_seconds(ranks: int, cores: int | None = None) -> float:
    """Return the default transfer time of a packet, which depends on how oversubscribed the cores are.

    Args:
        ranks: number of ranks of the cluster.
        cores: number of cores; those that this process may use if None.
    """
    return CROWDED_PACKET_SECONDS if ranks > CROWD * (cores or len(os.sched_getaffinity(0))) else PACKET_SECONDS


def address(rank: int) -> str:
    """Return the IP address of a rank. Clusters do not see each other, so all use the same addresses."""
    return f"10.77.0.{rank + 1}"


def from_environment(environment: Mapping[str, str] = os.environ) -> Cluster | None:
    """Return the emulated cluster of this process, or None outside of one."""
    if not (text := environment.get(CLUSTER_VARIABLE)):
        return None
    fields = json.loads(text)
    del fields["nodes"]
    return Cluster(Topology.parse(fields.pop("topology"), fields.pop("ranks")), **fields)


def check_rates(rates: Mapping[str, float]) -> None:
    """Raise ValueError if the rate of an axis is out of range."""
    for axis, rate in rates.items():
        if not MIN_RATE <= rate <= MAX_RATE:
            raise ValueError(f"{axis}={rate:g} Mbit/s is not valid; valid are {MIN_RATE:g} to {MAX_RATE:g} Mbit/s")


def build_commands(cluster: Cluster, rank: int) -> list[str]:
    """Return the `tc` commands that create the links of a rank on an unshaped interface."""
    filters = [
        f"filter add dev {INTERFACE} parent 1: protocol ip prio 1 u32 match ip dst {address(peer)}/32 "
        f"flowid 1:{_queue(peer):x}"
        for peer in range(cluster.size)
        if peer != rank
    ]
    # Traffic that no filter matches, such as ARP, is not shaped.
    return [f"qdisc add dev {INTERFACE} root handle 1: htb", *class_commands(cluster, rank), *filters]


def class_commands(cluster: Cluster, rank: int) -> list[str]:
    """Return the `tc` commands that add the classes of a rank: one per link, with a queue for each peer.

    In a shared queue, connections would get unequal throughput (up to 1.5x of another's), depending on their TCP state.
    Separate queues are served round-robin, as network cards do.
    """
    lines = []
    for number, link in enumerate(cluster.links(rank), 1):
        packet = cluster.packet_bytes(link.axis)
        sent = packet + ETHERNET_HEADER + ACKNOWLEDGEMENT_SHARE
        rate = round(cluster.rates[link.axis] * 1e6 * sent / (packet - TCP_HEADERS))
        burst = max(1, round(rate / 8 * BURST_SECONDS))
        lines.append(
            f"class add dev {INTERFACE} parent 1: classid 1:{number:x} htb rate {rate}bit ceil {rate}bit "
            f"burst {burst} cburst {burst}"
        )
        # A queue has almost no rate of its own and borrows from its link; each turn sends one packet.
        lines += [
            f"class add dev {INTERFACE} parent 1:{number:x} classid 1:{_queue(peer):x} htb rate 1kbit "
            f"ceil {rate}bit burst 1 cburst {MAX_PACKET + burst} quantum {packet + ETHERNET_HEADER}"
            for peer in link.ranks
        ]
    return lines


def _queue(peer: int) -> int:
    """Return the number of the class of the queue to a rank; links have smaller numbers."""
    return 0x1000 + peer


def route_commands(cluster: Cluster, rank: int) -> list[str]:
    """Return the `ip` commands that set the packet size (MTU) of the route to every other rank.

    The advertised segment size is the maximum, so that the route alone decides.
    """
    return [
        f"route replace {address(peer)}/32 dev {INTERFACE} src {address(rank)} "
        f"mtu lock {cluster.packet_bytes(link.axis)} advmss {MAX_PACKET - 40} rto_min {RETRANSMISSION_SECONDS}s"
        for link in cluster.links(rank)
        for peer in link.ranks
    ]


def run_batch(tool: str, lines: Sequence[str], namespace: str | None = None) -> None:
    """Run commands of `ip` or `tc`, in a namespace or in the caller's.

    Raises:
        RuntimeError: a command failed; contains the tool's message.
    """
    inside = ["-netns", namespace] if namespace else []
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run([tool, *inside, "-batch", "-"], input=text, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip() or f'exit status {done.returncode}'}")
