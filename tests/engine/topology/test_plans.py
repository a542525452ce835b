"""Notation and algebra of plans."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xfuser_cocodiff.engine.topology.plans import Plan, candidates
from xfuser_cocodiff.engine.topology.topology import AXIS_NAMES, Topology

AURORA = Topology.parse("2x3x2", 12)
topologies = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(
    lambda sizes: Topology.named(**dict(zip(AXIS_NAMES, sizes, strict=False)))
)


@pytest.mark.parametrize(
    "text",
    [
        "flat",
        "hierarchical:tile,gpu,node",
        "hierarchical:tile+gpu,node",
        "hierarchical:tile,gpu,node=kv",
    ],
)
def test_parse_inverts_str(text: str) -> None:
    assert str(Plan.parse(text, AURORA)) == text


def test_short_forms() -> None:
    assert str(Plan.parse("hierarchical", AURORA)) == "hierarchical:tile,gpu,node"
    assert str(Plan.parse("hierarchical:gpu+tile,node", AURORA)) == "hierarchical:tile+gpu,node"
    assert Plan.parse("hierarchical", Topology.flat(4)) == Plan.flat(Topology.flat(4))
    assert str(Plan.parse("hierarchical:gpu,node", Topology.parse("2x2x1", 4))) == "hierarchical:gpu,node"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ring", ["'ring'", "'flat'", "'hierarchical'"]),
        ("hierarchical:tile,gpu", ["each of the axes node, gpu, tile once"]),
        ("hierarchical:tile,gpu,gpu,node", ["each of the axes"]),
        ("hierarchical:tile+node,gpu", ["not adjacent"]),
        ("flat*", ["'flat*' is not valid: direct sends (*) were removed; leave * out"]),
        ("hierarchical:gpu,node,tile=kv", ["outermost axis, node"]),
    ],
)
def test_parse_errors(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"hierarchical|flat") as caught:
        Plan.parse(text, AURORA)
    assert all(word in str(caught.value) for word in words)


@given(topologies)
def test_every_candidate_crosses_every_axis_once(topology: Topology) -> None:
    nontrivial = [dim for dim, axis in enumerate(topology.axes) if axis.size > 1]
    for plan in candidates(topology):
        assert sorted(dim for stage in plan.stages for dim in stage) == nontrivial
        assert math.prod(plan.shape) == topology.size
        assert [plan.shape[dim] for dim in plan.dims] == [
            math.prod(topology.shape[dim] for dim in stage) for stage in plan.stages
        ]
        assert Plan.parse(str(plan), topology) == plan
