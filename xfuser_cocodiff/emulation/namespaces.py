"""Network namespaces of an emulated cluster: one for each rank, and one for the bridge that joins them.

Pairs of interfaces are made directly between those namespaces, so nothing of the host's network is touched. Names carry
the id of the launching process: clusters can stand side by side, and what a killed launcher left behind is known by it.
"""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from xfuser_cocodiff.emulation.links import MAX_PACKET, Cluster, build_commands, route_commands, run_batch

FOLDER = Path("/run/netns")
"""Where `ip netns` keeps its names."""
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

_NAME = re.compile(r"cocodiff-(\d+)-(?:bridge|rank\d+)")
_BRIDGE = "br0"


def address(rank: int) -> str:
    """IP address of a rank; every cluster has the same, since no cluster sees another."""
    return f"10.77.0.{rank + 1}"


def name(rank: int) -> str:
    """Namespace of a rank of the cluster that this process launches."""
    return f"cocodiff-{os.getpid()}-rank{rank}"


@contextlib.contextmanager
def joined(cluster: Cluster) -> Iterator[None]:
    """Make the namespaces of a cluster with their links, and remove them with all that runs in them.

    Raises:
        RuntimeError: they could not be made, for instance for lack of permission.
    """
    try:
        _make(cluster)
        yield
    finally:
        remove(os.getpid())


def _make(cluster: Cluster) -> None:
    bridge, ranks = f"cocodiff-{os.getpid()}-bridge", range(cluster.size)
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


def sweep() -> None:
    """Remove what launchers that are no longer alive have left behind."""
    for launcher in {int(match[1]) for match in map(_NAME.fullmatch, _names()) if match}:
        if not Path(f"/proc/{launcher}").exists():
            remove(launcher)


def remove(launcher: int) -> None:
    """End all processes in the namespaces of a launcher, and remove the namespaces; again and again does no harm."""
    for namespace in _names():
        if (match := _NAME.fullmatch(namespace)) and int(match[1]) == launcher:
            _end_processes(namespace)
            # Another launcher may be sweeping the same; what counts is that it is gone.
            with contextlib.suppress(RuntimeError):
                run_batch("ip", [f"netns del {namespace}"])


def _end_processes(namespace: str) -> None:
    """Kill what runs in a namespace, also what has left the session of its rank."""
    deadline = time.monotonic() + 5
    while (found := processes(namespace)) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def processes(namespace: str) -> list[int]:
    """Ids of the processes in a namespace."""
    try:
        wanted = os.stat(FOLDER / namespace)
    except FileNotFoundError:
        return []
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        # Processes come and go while one looks.
        with contextlib.suppress(OSError):
            here = os.stat(f"/proc/{process}/ns/net")
            if (here.st_dev, here.st_ino) == (wanted.st_dev, wanted.st_ino):
                found.append(int(process))
    return found


def _names() -> list[str]:
    return sorted(entry.name for entry in FOLDER.iterdir()) if FOLDER.is_dir() else []
