"""Network namespaces of an emulated cluster: one per rank, and one for the bridge that joins them.

They are created inside the private namespaces of the cluster (:mod:`cluster`): the host's network stays
untouched, clusters can run side by side, and everything ends with the cluster's first process.
"""

import subprocess
from collections.abc import Mapping

from emulation.links import INTERFACE, MAX_PACKET, Cluster, address, build_commands, route_commands, run_batch

MAX_RANKS = 254
"""Addresses in the subnet of a cluster."""

SETTINGS = {
    # No packet is ever lost here, so Reno just fills the link. Other algorithms probe, pace and back off, which would
    # be measured along with the link.
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
    "net/ipv4/tcp_early_retrans": "0",  # no probes for lost packets while a message waits in a queue
}
"""Kernel settings in the namespace of a rank."""
BRIDGE_SETTINGS = {
    "net/bridge/bridge-nf-call-iptables": "0",
    "net/bridge/bridge-nf-call-ip6tables": "0",
    "net/bridge/bridge-nf-call-arptables": "0",
}
"""Kernel settings in the namespace of the bridge: no firewall inspects forwarded packets, which would cost time."""

_BRIDGE = "br0"


def name(rank: int) -> str:
    """Return the name of a rank's namespace."""
    return f"rank{rank}"


def make(cluster: Cluster) -> None:
    """Create the namespaces and links of a cluster.

    Raises:
        RuntimeError: a command failed, for example for lack of permission.
    """
    bridge, ranks = "bridge", range(cluster.size)
    run_batch("ip", [f"netns add {namespace}" for namespace in (bridge, *map(name, ranks))])
    # There is no router or multicast listener, and no snooping saves CPU time.
    run_batch("ip", [f"link add {_BRIDGE} mtu {MAX_PACKET} type bridge mcast_snooping 0"], bridge)
    for rank in ranks:
        run_batch("ip", [f"link add {INTERFACE} type veth peer name port{rank} netns {bridge}"], name(rank))
    ports = [f"link set port{rank} mtu {MAX_PACKET} master {_BRIDGE} addrgenmode none up" for rank in ranks]
    run_batch("ip", [*ports, f"link set {_BRIDGE} addrgenmode none up"], bridge)
    _set(BRIDGE_SETTINGS, bridge)
    for rank in ranks:
        _make_rank(cluster, rank)


def _make_rank(cluster: Cluster, rank: int) -> None:
    # gso_max_segs 1 turns segmentation offload off. The queue is long enough for the packets of 254 ranks.
    link = f"link set {INTERFACE} mtu {MAX_PACKET} gso_max_segs 1 txqueuelen 10000 addrgenmode none up"
    own_address = f"addr add {address(rank)}/24 dev {INTERFACE}"
    run_batch("ip", ["link set lo up", link, own_address, *route_commands(cluster, rank)], name(rank))
    run_batch("tc", build_commands(cluster, rank), name(rank))
    _set(SETTINGS, name(rank))


def _set(settings: Mapping[str, str], namespace: str) -> None:
    """Apply kernel settings in a namespace; skip those that this kernel lacks."""
    lines = [f"[ ! -e /proc/sys/{key} ] || echo {value} > /proc/sys/{key}" for key, value in settings.items()]
    command = ["ip", "netns", "exec", namespace, "sh", "-ec", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"kernel settings of a namespace could not be applied: {done.stderr.strip()}")
