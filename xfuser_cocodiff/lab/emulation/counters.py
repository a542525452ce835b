"""Counters of an emulated cluster: bytes that a rank has sent on the links of each axis."""

import os
import re

from xfuser_cocodiff.lab.emulation import links
from xfuser_cocodiff.lab.emulation.links import ETHERNET_HEADER, TCP_HEADERS, Cluster

_HEADERS = ETHERNET_HEADER + TCP_HEADERS
_LINK = re.compile(r"^class htb 1:([0-9a-f]+) root .*\n Sent (\d+) bytes (\d+) pkt", re.MULTILINE)


def payload_bytes() -> dict[str, int]:
    """Return the bytes that the calling rank has sent since its links were created, by axis, without headers.

    Packets that still wait in a queue are not counted: call this after a barrier. Traffic of the backend counts, such
    as gloo's message headers and the store of the process group. The headers of Ethernet, IP and TCP with timestamps
    are taken off every packet, so that acknowledgements count 0. Beside the payload, 8 bytes of options count in the
    first packet of a connection, and packets that TCP sends again.

    Raises:
        RuntimeError: this process is not a rank of an emulated cluster, or `tc` failed.
    """
    cluster = links.of_this_rank()
    # Its JSON output lacks statistics of classes in some versions of iproute2, such as 6.1.
    text = links.run_tool("tc", "-s", "class", "show", "dev", cluster.interface)
    return parse(text, cluster, int(os.environ["RANK"]))


def parse(text: str, cluster: Cluster, rank: int) -> dict[str, int]:
    """Return the payload bytes by axis from the output of `tc -s class show` of a rank."""
    sent = {int(number, 16): int(size) - _HEADERS * int(packets) for number, size, packets in _LINK.findall(text)}
    total = dict.fromkeys(cluster.rates, 0)
    for number, link in enumerate(cluster.links(rank), 1):
        total[link.axis] += sent[number]
    return total
