"""Algebra of topologies, without processes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xfuser_cocodiff.engine.topology.topology import AXIS_NAMES, Topology

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@pytest.mark.parametrize(
    ("text", "size", "shape", "name"),
    [
        ("flat", 8, (8,), "flat"),
        ("node=2,gpu=3,tile=2", 12, (2, 3, 2), "node=2,gpu=3,tile=2"),
        (" node = 2 , tile=2", 4, (2, 2), "node=2,tile=2"),
        ("2x3x2", 12, (2, 3, 2), "node=2,gpu=3,tile=2"),
        ("tile=2,gpu=6", 12, (6, 2), "gpu=6,tile=2"),
        ("node=2,switch=2,gpu=2", 8, (2, 2, 2), "node=2,switch=2,gpu=2"),
    ],
)
def test_parse(text: str, size: int, shape: tuple[int, ...], name: str) -> None:
    topology = Topology.parse(text, size)
    assert topology.shape == shape
    assert str(topology) == name
    assert Topology.parse(str(topology), size) == topology


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        ("2x3", 8, "2 x 3 = 6 ranks, but the Ulysses degree is 8"),
        ("node=2,rack=4", 8, "unknown axis 'rack'; valid are node, socket, switch, gpu, tile"),
        ("node=2,node=4", 8, "has the same axis twice"),
        ("node=0,gpu=8", 8, "size 0 on axis 'node'"),
        ("2x2x2x2", 16, "has 4 axes, valid are at most 3"),
        ("", 2, "valid are 'flat'"),
        ("-2x2", 4, "is not valid; valid are"),
    ],
)
def test_parse_errors(text: str, size: int, message: str) -> None:
    with pytest.raises(ValueError, match="topology") as caught:
        Topology.parse(text, size)
    assert message in str(caught.value)


@given(sizes)
def test_ranks_and_coordinates_are_inverse(shape: list[int]) -> None:
    topology = Topology.named(**dict(zip(AXIS_NAMES, shape, strict=False)))
    # itertools.product runs the last axis fastest, as launchers number ranks.
    positions = list(itertools.product(*map(range, shape)))
    assert [topology.coordinates(rank) for rank in range(topology.size)] == positions
    assert [topology.rank(position) for position in positions] == list(range(topology.size))


@given(sizes)
def test_groups_of_each_axis_partition_the_ranks(shape: list[int]) -> None:
    topology = Topology.named(**dict(zip(AXIS_NAMES, shape, strict=False)))
    for dim, size in enumerate(shape):
        groups = {topology.group_of(rank, dim) for rank in range(topology.size)}
        assert sorted(itertools.chain(*groups)) == list(range(topology.size))
        for group in groups:
            assert len(group) == size
            assert all(topology.group_of(rank, dim) == group for rank in group)
            assert [topology.coordinates(rank)[dim] for rank in group] == list(range(size))
