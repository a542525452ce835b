"""Time dilation: an emulated cluster in slow motion, whose links have a machine's real rates divided by a factor D.

Each rank has one port per axis, as the planner and the simulator assume. Computation and latency are not emulated here:
who measures in slow motion makes them D times as long too, and divides measured times by D.

Packets are large, so that links cost little CPU time: about 3.7 ns a byte with packets of 16 kB and 2.1 ns with 65 kB,
both ends together (24 ranks on two busy cores). The shaper charges for a packet after it was sent. So a message on an
idle link takes up to `packet_seconds` / D of undilated time less than bytes / rate (2 us at D = 1000), or up to the
time of 1500 bytes where that is more.
"""

import dataclasses
from collections.abc import Mapping

from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.lab.emulation import links, namespaces
from xfuser_cocodiff.lab.emulation.links import MAX_RATE, MIN_RATE, Cluster

MEGABIT = 1e6 / 8
"""Bytes per second of 1 Mbit/s."""
PACKET_SECONDS = 2e-3
"""Default transfer time of a packet in slow motion."""
MAX_PACKET = 65_000
"""Maximum size of a packet in slow motion, which 2 ms reach at 260 Mbit/s. IP permits 65,535 bytes."""


def slow_cluster(profile: Profile, dilation: float, packet_seconds: float = PACKET_SECONDS) -> Cluster:
    """Return a cluster with the links of a profile in slow motion.

    Args:
        profile: topology of all ranks, and the bandwidth of a rank along each axis.
        dilation: factor by which the links are slower, D.
        packet_seconds: transfer time of a packet in slow motion; more saves CPU time.

    Raises:
        ValueError: a link cannot be emulated at this dilation; names the valid ones.
    """
    axes = [(axis, link) for axis, link in zip(profile.topology.axes, profile.links, strict=True) if axis.size > 1]
    rates = {axis.name: link.bytes_per_second / MEGABIT for axis, link in axes}
    cluster = Cluster(
        profile.topology,
        rates,
        tuple(map(namespaces.address, range(profile.topology.size))),
        packet_seconds=packet_seconds,
        ports=tuple(rates),
        max_packet=MAX_PACKET,
    )
    return _slowed(cluster, dilation)


def change_dilation(dilation: float) -> Cluster:
    """Set the links of the calling rank to their real rates divided by `dilation`.

    All ranks must call this, with no traffic in flight and a barrier after it. Open connections continue.

    Returns:
        The cluster with its new rates.

    Raises:
        ValueError: a link cannot be emulated at this dilation; names the valid ones.
        RuntimeError: this process is not a rank of an emulated cluster.
    """
    return links.shape(_slowed(links.of_this_rank(), dilation).scale)


def _slowed(cluster: Cluster, dilation: float) -> Cluster:
    """Return the cluster at this dilation; raise ValueError if it is out of range."""
    lowest, highest = dilations(cluster)
    if not lowest <= dilation <= highest:
        rates = ", ".join(f"{axis}={rate:g}" for axis, rate in cluster.rates.items())
        raise ValueError(
            f"dilation {dilation:g} is not valid; valid are {lowest:.4g} to {highest:.4g}, at which links of {rates} "
            f"Mbit/s have {MIN_RATE:g} to {MAX_RATE:g} Mbit/s"
        )
    return dataclasses.replace(cluster, scale=1 / dilation)


def unshaped_seconds(cluster: Cluster, sent: Mapping[str, int]) -> float:
    """Return the real seconds by which messages on idle links take less than bytes / rate: those of a first packet.

    Args:
        cluster: the cluster in slow motion.
        sent: bytes that a rank sends along each axis.
    """
    seconds = {axis: size / (cluster.rate(axis) * MEGABIT) for axis, size in sent.items()}
    slowest = max(seconds, key=lambda axis: seconds[axis], default=None)
    if slowest is None:
        return 0.0
    return min(cluster.packet_bytes(slowest), sent[slowest]) / (cluster.rate(slowest) * MEGABIT)


def dilations(cluster: Cluster) -> tuple[float, float]:
    """Return the lowest and highest dilation at which the rates of all links are valid."""
    return max(cluster.rates.values()) / MAX_RATE, min(cluster.rates.values()) / MIN_RATE
