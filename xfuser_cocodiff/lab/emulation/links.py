"""The links of an emulated cluster: who shares which, how fast each is, and the `tc` commands that make it so.

A link belongs to the rank that sends on it, and is shared by all the ranks that it leads to:

======  ==========================================================================
axis    links of one rank
======  ==========================================================================
tile    one to every other tile of its GPU
gpu     one to every other GPU of its node, shared by that GPU's tiles
node    one to all other nodes together: the rank's share of its node's network cards
flat    one to everybody: a port
======  ==========================================================================

Rates count what TCP delivers, in Mbit/s. Latency is not emulated: it is that of the machine, 0.05 to 0.1 ms.
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
"""Mbit/s; below it a packet takes longer than a connection waits, above it no link of this kind is a limit."""

# What follows was measured on two cores of an AMD EPYC, between two ranks: rates of 1 to 500 Mbit/s are met within 3 %
# (1000 within 6 %), and a message of 16 KiB takes 0.95 of its bytes over the rate up to 40 Mbit/s, one of 64 KiB at
# least 0.8 up to 500. Smaller ones are cheaper than that, since a shaper charges for a packet after it was sent.
#
# Packets of a quarter of a millisecond keep the cost of a link at 4000 packets a second whatever its rate. Slow links
# have packets of 1500 bytes: smaller ones lose more to headers, larger ones make short messages free. Segmentation
# offload is off, for it hands the shaper packets of up to 64 KiB, and 16 KiB then cost nothing at any rate.
PACKET_SECONDS = 250e-6
# Where many ranks share a core, the shapers of so many small packets take as much of it as the ranks do, and links miss
# their rates: 24 ranks on two cores reach 0.94 of it, and 0.98 with packets as large as there are.
CROWDED_PACKET_SECONDS = 8e-3
CROWD = 8
"""Ranks that share a core without that."""
MIN_PACKET, MAX_PACKET = 1500, 16_000
ETHERNET_HEADER, TCP_HEADERS = 14, 52
# An all-to-all is busy both ways, and every second packet is acknowledged on the link that leads back.
ACKNOWLEDGEMENT_SHARE = (ETHERNET_HEADER + TCP_HEADERS) / 2
# What a link may catch up after it was served late. Without it, every late timer costs throughput; it is also what an
# idle link sends for free.
BURST_SECONDS = 250e-6


@dataclass(frozen=True)
class Link:
    """A link that one rank sends on."""

    axis: str
    ranks: tuple[int, ...]
    """The ranks it leads to, which share it."""


@dataclass(frozen=True)
class Cluster:
    """An emulated cluster: what was asked of it, and how its ranks find each other."""

    topology: Topology
    rates: Mapping[str, float]
    """Mbit/s of every axis at scale 1; one for ``flat`` makes all links of a rank one port."""
    addresses: tuple[str, ...]
    """IP address of every rank."""
    preset: str | None = None
    scale: float = 1.0
    interface: str = INTERFACE
    packet_seconds: float = PACKET_SECONDS
    """How long a packet takes on its link, as far as packets can be of such sizes."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.addresses)

    def rate(self, axis: str) -> float:
        """Mbit/s asked of a link along an axis."""
        return self.rates[axis] * self.scale

    def packet_bytes(self, axis: str) -> int:
        """Size of the IP packets on a link along an axis."""
        return min(max(round(self.rate(axis) * 1e6 / 8 * self.packet_seconds), MIN_PACKET), MAX_PACKET)

    def links(self, rank: int) -> tuple[Link, ...]:
        """The links that a rank sends on, by the first rank that each leads to."""
        shared: dict[tuple, list[int]] = {}
        here = self.topology.coordinates(rank)
        for peer in range(self.size):
            if peer != rank:
                shared.setdefault(self._link(here, self.topology.coordinates(peer)), []).append(peer)
        return tuple(Link(key[0], tuple(ranks)) for key, ranks in shared.items())

    def _link(self, here: Sequence[int], there: Sequence[int]) -> tuple:
        """Axis of the link between two places, and what tells it from others of that axis."""
        if FLAT in self.rates:
            return (FLAT,)
        axis, place = next((a.name, t) for a, h, t in zip(self.topology.axes, here, there, strict=True) if h != t)
        return (axis,) if axis == "node" else (axis, place)

    def to_json(self) -> str:
        """The text of the variable in which ranks find their cluster."""
        return json.dumps({**dataclasses.asdict(self), "topology": str(self.topology)})

    @classmethod
    def from_json(cls, text: str) -> "Cluster":
        """The inverse of :meth:`to_json`."""
        fields = json.loads(text)
        addresses = tuple(fields.pop("addresses"))
        return cls(topology=Topology.parse(fields.pop("topology"), len(addresses)), addresses=addresses, **fields)


def packet_seconds(ranks: int, cores: int | None = None) -> float:
    """How long packets take on their links where nobody says, by what the processor can do.

    Args:
        ranks: of the cluster.
        cores: of this machine; those that this process may use when not given.
    """
    return CROWDED_PACKET_SECONDS if ranks > CROWD * (cores or len(os.sched_getaffinity(0))) else PACKET_SECONDS


def from_environment(environment: Mapping[str, str] = os.environ) -> Cluster | None:
    """The emulated cluster that this process is a rank of, or None outside of one."""
    text = environment.get(CLUSTER_VARIABLE)
    return Cluster.from_json(text) if text else None


def shape(scale: float, packet_seconds: float | None = None) -> Cluster:
    """Give the links of the calling rank `scale` times the rates that the cluster has at scale 1.

    Every rank shapes what it sends, so all of them call this, with nothing on its way and a barrier after it. Open
    connections go on at the new rates.

    Args:
        scale: of all rates.
        packet_seconds: how long a packet may take, if that is to change. Large packets spare the processor, which
            matters to ranks that compute meanwhile, and blur what short messages take.

    Returns:
        The cluster as it is now, which :func:`from_environment` also returns from here on.

    Raises:
        ValueError: a rate out of range.
        RuntimeError: the calling process is no rank of an emulated cluster.
    """
    cluster = from_environment()
    if cluster is None:
        raise RuntimeError(f"only a rank of an emulated cluster can shape its links; {CLUSTER_VARIABLE} is not set")
    cluster = dataclasses.replace(cluster, scale=scale, packet_seconds=packet_seconds or cluster.packet_seconds)
    check_rates(cluster)
    rank = int(os.environ["RANK"])
    run_batch("tc", class_commands(cluster, rank, "change"))
    run_batch("ip", route_commands(cluster, rank))
    os.environ[CLUSTER_VARIABLE] = cluster.to_json()
    return cluster


def check_rates(cluster: Cluster) -> None:
    """Raise ValueError for an axis whose rate no link can have."""
    for axis in cluster.rates:
        if not MIN_RATE <= (rate := cluster.rate(axis)) <= MAX_RATE:
            raise ValueError(f"{axis}={rate:g} Mbit/s is not valid; links have {MIN_RATE:g} to {MAX_RATE:g} Mbit/s")


def build_commands(cluster: Cluster, rank: int) -> list[str]:
    """Lines for `tc` that make the links of a rank on an interface that has none yet."""
    interface = cluster.interface
    filters = [
        f"filter add dev {interface} parent 1: protocol ip prio 1 u32 match ip dst {cluster.addresses[peer]}/32 "
        f"flowid 1:{_queue(peer):x}"
        for peer in range(cluster.size)
        if peer != rank
    ]
    # What no filter names, such as ARP, is not shaped.
    return [f"qdisc add dev {interface} root handle 1: htb", *class_commands(cluster, rank, "add"), *filters]


def class_commands(cluster: Cluster, rank: int, verb: str) -> list[str]:
    """Lines for `tc` that add or change the classes of a rank: one per link, and in it a queue for every other rank.

    In one queue for all, connections would get what their state of the moment brings them, up to half as much again as
    their neighbours; queues of their own are served in turn, as network cards do it.
    """
    lines = []
    for number, link in enumerate(cluster.links(rank), 1):
        packet = cluster.packet_bytes(link.axis)
        sent = packet + ETHERNET_HEADER + ACKNOWLEDGEMENT_SHARE
        rate = round(cluster.rate(link.axis) * 1e6 * sent / (packet - TCP_HEADERS))
        burst = max(1, round(rate / 8 * BURST_SECONDS))
        lines.append(
            f"class {verb} dev {cluster.interface} parent 1: classid 1:{number:x} htb rate {rate}bit ceil {rate}bit "
            f"burst {burst} cburst {burst}"
        )
        # A queue has next to nothing of its own, and borrows from the link; the turn of each is one packet.
        lines += [
            f"class {verb} dev {cluster.interface} parent 1:{number:x} classid 1:{_queue(peer):x} htb rate 1kbit "
            f"ceil {rate}bit burst 1 cburst {MAX_PACKET + burst} quantum {packet + ETHERNET_HEADER}"
            for peer in link.ranks
        ]
    return lines


def _queue(peer: int) -> int:
    """Number of the class that holds the queue to a rank; links have smaller ones."""
    return 0x1000 + peer


def route_commands(cluster: Cluster, rank: int) -> list[str]:
    """Lines for `ip` that give the packets to every other rank the size that suits the link.

    Segments are offered at their largest, so that the route alone decides, and can change while connections are open.
    """
    return [
        f"route replace {cluster.addresses[peer]}/32 dev {cluster.interface} src {cluster.addresses[rank]} "
        f"mtu lock {cluster.packet_bytes(link.axis)} advmss {MAX_PACKET - 40}"
        for link in cluster.links(rank)
        for peer in link.ranks
    ]


def run_batch(tool: str, lines: Sequence[str], namespace: str | None = None) -> None:
    """Run lines of `ip` or `tc`, in a namespace or in that of the caller.

    Raises:
        RuntimeError: one of them failed; holds what the tool says.
    """
    inside = ["-netns", namespace] if namespace else []
    # A session of its own: Ctrl-C is for the launcher, which cleans up after what has been made.
    done = subprocess.run(
        [tool, *inside, "-batch", "-"],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip() or f'exit status {done.returncode}'}")
