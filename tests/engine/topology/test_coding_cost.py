"""The cost of coding: figures computed by hand."""

import dataclasses

import pytest

from tests.engine.topology.test_planner import profile_of
from xfuser_cocodiff.engine.topology.coding_cost import CodingCost


def test_one_slow_axis_takes_its_bandwidth() -> None:
    profile = dataclasses.replace(profile_of([2, 4], [1e9, 1e12], 0.0, 0.0), coding_host_seconds=3e-4)
    cost = CodingCost.of(profile, ("node",))
    assert cost.link_seconds_per_byte == pytest.approx(1e-9)
    assert cost.saved_link_seconds(1e6) == pytest.approx(0.9e-3)  # a coded message has a tenth of the bytes
    assert cost.added_host_seconds(4) == pytest.approx(12e-4)


def test_bytes_cross_several_slow_axes_one_after_the_other() -> None:
    """Of 12 bytes, 9 are for other coordinates; 6 of them cross `node` at 2 B/s, and 6 cross `gpu` at 3 B/s."""
    cost = CodingCost.of(profile_of([2, 2], [2.0, 3.0], 0.0, 0.0), ("node", "gpu"))
    assert 9 * cost.link_seconds_per_byte == pytest.approx(6 / 2 + 6 / 3)
