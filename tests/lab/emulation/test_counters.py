"""Counters of links: their arithmetic. `test_forked_ranks` counts real traffic."""

from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.emulation import counters
from xfuser_cocodiff.lab.emulation.links import Cluster

TEXT = """class htb 1:1003 parent 1:3 prio 0 rate 1Kbit ceil 20Mbit burst 1b cburst 16Kb
 Sent 9999 bytes 9 pkt (dropped 0, overlimits 0 requeues 0)
 backlog 0b 0p requeues 0

class htb 1:1 root rate 20Mbit ceil 20Mbit burst 1b cburst 16Kb
 Sent 2132 bytes 2 pkt (dropped 0, overlimits 1 requeues 0)
 backlog 0b 0p requeues 0

class htb 1:2 root rate 20Mbit ceil 20Mbit burst 1b cburst 16Kb
 Sent 566 bytes 1 pkt (dropped 0, overlimits 0 requeues 0)

class htb 1:3 root rate 20Mbit ceil 20Mbit burst 1b cburst 16Kb
 Sent 66 bytes 1 pkt (dropped 0, overlimits 0 requeues 0)
"""


def test_payload_by_axis() -> None:
    """Two links of an axis together, without 66 bytes of headers a packet: 14 Ethernet, 20 IP, 20 TCP, 12 timestamps.

    Rank 0 has links to rank 1 of its node, to ranks 2 and 3 of the other GPUs, and to the other node."""
    topology = Topology.parse("node=2,gpu=3,tile=2")
    addresses = tuple(map(str, range(12)))
    built = Cluster(topology, {"node": 20, "gpu": 20, "tile": 20}, addresses, ports=("gpu",))
    assert counters.parse(TEXT, built, 0) == {"tile": 2000, "gpu": 500, "node": 0}
    built = Cluster(Topology.parse("node=1,gpu=3,tile=2"), {"gpu": 20, "tile": 20}, addresses[:6])
    assert counters.parse(TEXT, built, 0) == {"tile": 2000, "gpu": 500}
