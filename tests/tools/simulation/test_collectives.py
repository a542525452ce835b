"""Costs of collectives, against bytes and seconds computed by hand."""

import pytest

from tests.engine.topology.test_planner import MESSAGE, profile_of
from xfuser_cocodiff.tools.simulation.collectives import coded_all_to_all, ring_gather


def test_coded_all_to_alls_cross_the_fast_axes_unencoded_then_the_slow_ones() -> None:
    """12 MB, two nodes of two GPUs: 6 MB across GPUs, then 0.6 MB across nodes, in two messages."""
    cost = coded_all_to_all(profile_of([2, 2], [1e6, 1e7], latency=0.05, launch=0.0), MESSAGE, MESSAGE / 10, ["node"])
    assert cost.seconds == pytest.approx(0.6 + 0.6 + 2 * 0.05)
    assert (cost.sent_bytes, cost.collectives) == ({"node": MESSAGE / 20, "gpu": MESSAGE / 2}, 2)


def test_blocks_of_a_coded_ring_cross_the_fast_axes_once() -> None:
    """After those of other nodes have been decoded, a rank sends them and its own block to the others of its node."""
    cost = ring_gather(profile_of([3, 4], [1e8, 1e9], latency=0.0, launch=0.0), MESSAGE, MESSAGE / 8, ["node"])
    assert (cost.sent_bytes, cost.collectives) == ({"node": 2 * MESSAGE / 8, "gpu": 3 * (MESSAGE + 2 * MESSAGE)}, 3)
