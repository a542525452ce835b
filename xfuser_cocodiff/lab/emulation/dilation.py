"""Time dilation: an emulated cluster in slow motion, whose links have a machine's real rates divided by a factor D.

Each rank has one port per axis, as the planner and the simulator assume. Computation and latency are not emulated here:
who measures in slow motion makes them D times as long too, and divides measured times by D.

Packets are large, so that links cost little CPU time. The shaper charges for a packet after it was sent. So a message
on an idle link takes up to `PACKET_SECONDS` / D of undilated time less than bytes / rate (2 us at D = 1000), or up to
the time of 1500 bytes where that is more.
"""

import dataclasses

from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.lab.emulation import links, namespaces
from xfuser_cocodiff.lab.emulation.links import MAX_RATE, MIN_RATE, Cluster

MEGABIT = 1e6 / 8
"""Bytes per second of 1 Mbit/s."""
PACKET_SECONDS = 2e-3
"""Transfer time of a packet in slow motion: above 64 Mbit/s, packets have the maximum size."""


def slow_cluster(profile: Profile, dilation: float) -> Cluster:
    """Return a cluster with the links of a profile in slow motion.

    Args:
        profile: topology of all ranks, and the bandwidth of a rank along each axis.
        dilation: factor by which the links are slower, D.

    Raises:
        ValueError: a link cannot be emulated at this dilation; names the valid ones.
    """
    axes = [(axis, link) for axis, link in zip(profile.topology.axes, profile.links, strict=True) if axis.size > 1]
    rates = {axis.name: link.bytes_per_second / MEGABIT for axis, link in axes}
    cluster = Cluster(
        profile.topology,
        rates,
        tuple(map(namespaces.address, range(profile.topology.size))),
        packet_seconds=PACKET_SECONDS,
        ports=tuple(rates),
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
    return links.shape(_slowed(links.of_this_rank(), dilation).scale, PACKET_SECONDS)


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


def dilations(cluster: Cluster) -> tuple[float, float]:
    """Return the lowest and highest dilation at which the rates of all links are valid."""
    return max(cluster.rates.values()) / MAX_RATE, min(cluster.rates.values()) / MIN_RATE
