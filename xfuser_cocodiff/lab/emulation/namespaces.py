"""Network namespaces of an emulated cluster: one for each rank, and one for the bridge that joins them.

They are made inside the namespaces that a cluster has to itself (:mod:`user_namespace`): nothing of the host's network
is touched, clusters can stand side by side, and all of it goes with its first process.
"""

import subprocess
from collections.abc import Mapping

from xfuser_cocodiff.lab.emulation.links import MAX_PACKET, Cluster, build_commands, route_commands, run_batch

MAX_RANKS = 254
"""Addresses in the subnet of a cluster."""

SETTINGS = {
    # No packet is ever lost here. Plain Reno then does nothing but fill the link; what machines use instead probes,
    # paces and backs off by itself, which would be measured along with the link.
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
}
"""Kernel settings in the namespace of a rank."""
BRIDGE_SETTINGS = {
    "net/bridge/bridge-nf-call-iptables": "0",
    "net/bridge/bridge-nf-call-ip6tables": "0",
    "net/bridge/bridge-nf-call-arptables": "0",
}
"""Kernel settings in the namespace of the bridge: no firewall looks at what it forwards, which would cost time."""

_BRIDGE = "br0"


def address(rank: int) -> str:
    """IP address of a rank; every cluster has the same, since no cluster sees another."""
    return f"10.77.0.{rank + 1}"


def name(rank: int) -> str:
    """Namespace of a rank."""
    return f"rank{rank}"


def make(cluster: Cluster) -> None:
    """Make the namespaces of a cluster with their links.

    Raises:
        RuntimeError: they could not be made, for instance for lack of permission.
    """
    bridge, ranks = "bridge", range(cluster.size)
    run_batch("ip", [f"netns add {namespace}" for namespace in (bridge, *map(name, ranks))])
    # No router or multicast listener is in here, and silence is easier on the processor.
    run_batch("ip", [f"link add {_BRIDGE} mtu {MAX_PACKET} type bridge mcast_snooping 0"], bridge)
    for rank in ranks:
        run_batch("ip", [f"link add {cluster.interface} type veth peer name port{rank} netns {bridge}"], name(rank))
    ports = [f"link set port{rank} mtu {MAX_PACKET} master {_BRIDGE} addrgenmode none up" for rank in ranks]
    run_batch("ip", [*ports, f"link set {_BRIDGE} addrgenmode none up"], bridge)
    _set(BRIDGE_SETTINGS, bridge)
    for rank in ranks:
        _make_rank(cluster, rank)


def _make_rank(cluster: Cluster, rank: int) -> None:
    interface = cluster.interface
    # gso_max_segs 1 is segmentation offload turned off. The queue holds what 254 ranks may have on their way.
    link = f"link set {interface} mtu {MAX_PACKET} gso_max_segs 1 txqueuelen 10000 addrgenmode none up"
    here = f"addr add {cluster.addresses[rank]}/24 dev {interface}"
    run_batch("ip", ["link set lo up", link, here, *route_commands(cluster, rank)], name(rank))
    run_batch("tc", build_commands(cluster, rank), name(rank))
    _set(SETTINGS, name(rank))


def _set(settings: Mapping[str, str], namespace: str) -> None:
    """Make kernel settings in a namespace, as far as this kernel has them."""
    lines = [f"[ ! -e /proc/sys/{key} ] || echo {value} > /proc/sys/{key}" for key, value in settings.items()]
    command = ["ip", "netns", "exec", namespace, "sh", "-ec", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode != 0:
        raise RuntimeError(f"kernel settings of a namespace could not be made: {done.stderr.strip()}")
