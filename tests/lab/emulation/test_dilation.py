"""The emulated cluster in slow motion."""

import re

import pytest

from xfuser_cocodiff.engine.topology.link_profile import AxisLink, Profile
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.emulation import dilation, links

NODES = Profile(
    Topology.parse("node=2,gpu=6,tile=2"),
    (AxisLink("node", 1e-6, 200e9 / 12), AxisLink("gpu", 1e-6, 7.5e9), AxisLink("tile", 1e-6, 185e9)),
    launch_seconds=0,
    copy_bytes_per_second=1,
    codec_bytes_per_second=1,
)
"""Rates as of Aurora: eight cards of 25 GB/s for the twelve tiles of a node."""


def test_links_a_thousand_times_slower() -> None:
    """200 GB/s for 12 tiles are 133.3 Gbit/s each; 7.5 GB/s and 185 GB/s are 60 and 1480 Gbit/s."""
    slowed = dilation.slow_cluster(NODES, 1000)
    found = {link.axis: (round(slowed.rate(link.axis), 1), link.ranks) for link in slowed.links(1)}
    assert found == {
        "tile": (1480, (0,)),
        "gpu": (60, tuple(range(2, 12))),
        "node": (133.3, tuple(range(12, 24))),
    }
    assert (slowed.size, len(slowed.links(1))) == (24, 3)


def test_packets_have_a_transfer_time_up_to_a_maximum_size() -> None:
    """2 ms are 15,000 bytes at 60 Mbit/s and 33,333 at 133.3 Mbit/s; 4 ms are twice that, but an IP packet has less
    than 65,536 bytes, which both exceed at 1480 Mbit/s."""
    found = dilation.slow_cluster(NODES, 1000)
    assert {axis: found.packet_bytes(axis) for axis in found.rates} == {"tile": 65_000, "gpu": 15_000, "node": 33_333}
    found = dilation.slow_cluster(NODES, 1000, packet_seconds=4e-3)
    assert {axis: found.packet_bytes(axis) for axis in found.rates} == {"tile": 65_000, "gpu": 30_000, "node": 65_000}


def test_a_flat_profile_gives_each_rank_one_port() -> None:
    profile = Profile(Topology.flat(4), (AxisLink("flat", 0, 50e9),), 0, 1, 1)
    slowed = dilation.slow_cluster(profile, 400)
    assert (slowed.rate("flat"), slowed.links(1)) == (pytest.approx(1000), (links.Link("flat", (0, 2, 3)),))
    assert links.Cluster.from_json(slowed.to_json()) == slowed


@pytest.mark.parametrize("factor", [0, 147, 150_000_000, float("nan")])
def test_dilations_whose_links_cannot_be_emulated(factor: float) -> None:
    """185 GB/s are 1.48 million Mbit/s, 10,000 at 148; 60,000 Mbit/s are 0.1 at 600,000."""
    profile = NODES.restrict_to(Topology.parse("gpu=6,tile=2"))
    words = "valid are 148 to 6e+05, at which links of gpu=60000, tile=1.48e+06 Mbit/s have 0.1 to 10000 Mbit/s"
    with pytest.raises(ValueError, match=re.escape(words)):
        dilation.slow_cluster(profile, factor)
    dilation.slow_cluster(profile, 148)


def test_only_ranks_change_their_dilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(links.CLUSTER_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match="only a rank of an emulated cluster has links"):
        dilation.change_dilation(1000)


def test_the_first_packet_of_the_busiest_axis_is_free() -> None:
    """The shaper charges for a packet after it was sent, so an idle link moves the first one at once."""
    slowed = dilation.slow_cluster(NODES, 1000)
    rate, packet = slowed.rate("gpu") * 1e6 / 8, slowed.packet_bytes("gpu")
    assert dilation.unshaped_seconds(slowed, {"gpu": 100 * packet, "node": 1}) == pytest.approx(packet / rate)
    assert dilation.unshaped_seconds(slowed, {"gpu": 10}) == pytest.approx(10 / rate)
    assert dilation.unshaped_seconds(slowed, {}) == 0
