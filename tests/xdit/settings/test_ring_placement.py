"""Placement of Ulysses groups and rings: topologies against the ranks themselves, and options."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xfuser_cocodiff.engine.topology.link_profile import AxisLink, Profile
from xfuser_cocodiff.engine.topology.topology import AXIS_NAMES, Topology
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig
from xfuser_cocodiff.xdit.settings.resolve import resolve
from xfuser_cocodiff.xdit.settings.ring_placement import SequenceRanks

topologies = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(
    lambda sizes: Topology.named(**dict(zip(AXIS_NAMES, sizes, strict=False)))
)


def axis_between(topology: Topology, one: int, other: int) -> str | None:
    """Return the outermost axis on which two ranks differ: the axis of their link."""
    places = zip(topology.axes, topology.coordinates(one), topology.coordinates(other), strict=True)
    return next((axis.name for axis, here, there in places if here != there), None)


@given(topologies, st.data())
def test_part_of_a_topology_has_the_links_of_its_ranks(whole: Topology, data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([n for n in range(1, whole.size + 1) if whole.size % n == 0]))
    stride = whole.size // count
    for part, groups in (
        (whole.contiguous(count), [[first + i for i in range(count)] for first in range(0, whole.size, count)]),
        (whole.strided(count), [[first + i * stride for i in range(count)] for first in range(stride)]),
    ):
        assert part.size == count
        pairs = list(itertools.product(range(count), repeat=2))
        links = [[axis_between(whole, group[i], group[j]) for i, j in pairs] for group in groups]
        if part.axes[0].name != "flat":
            assert all([axis_between(part, i, j) for i, j in pairs] == group for group in links)
        elif count > 1:  # parts always align with the axes if sizes are powers of two
            assert any(axis.size not in (1, 2, 4) for axis in whole.axes)


def profile(sizes: str, *speeds: float) -> Profile:
    topology = Topology.parse(sizes)
    links = [AxisLink(axis.name, 0.0, speed) for axis, speed in zip(topology.axes, speeds, strict=True)]
    return Profile(topology, tuple(links), 0.0, 1e15, 1e15)


FAST = 1e12
WHOLE = Topology.parse("2x4")
RANKS = SequenceRanks(4, WHOLE, 2)


def settings(tmp_path: Path, known: Profile | None, ranks: SequenceRanks = RANKS, **values: str) -> CocoDiffConfig:
    options = {f"cocodiff_{name}": value for name, value in values.items()}
    if known:
        file = tmp_path / "profile.json"
        file.write_text(json.dumps({"profile": known.to_json()}))
        options["cocodiff_profile"] = str(file)
    return resolve({"use_cocodiff": True, **options}, {}, ranks)


def test_config_of_both_placements(tmp_path: Path) -> None:
    known = profile("2x4", 1e6, FAST)
    config = settings(tmp_path, None)
    assert (config.ring, str(config.topology), config.mode) == ("outer", "gpu=4", "balanced")
    assert str(config.ring_topology) == "node=2"
    config = settings(tmp_path, None, ring="inner")
    assert (config.ring, str(config.topology), config.mode) == ("inner", "node=2,gpu=2", "balanced")
    config = settings(tmp_path, known)
    assert (config.ring, str(config.topology), config.mode) == ("outer", "gpu=4", "balanced")
    assert config.profile.topology == config.topology and config.ring_profile.topology == Topology.parse("node=2")
    config = settings(tmp_path, known, mode="exact", ring="inner")
    assert (config.ring, str(config.topology), str(config.ring_profile.topology)) == ("inner", "node=2,gpu=2", "gpu=2")
    config = settings(tmp_path, None, topology="gpu=2,tile=2", ring="inner")  # of a Ulysses group, as given
    assert (config.ring, str(config.topology)) == ("inner", "gpu=2,tile=2")
    config = settings(tmp_path, None, topology="node=2,gpu=2,tile=2")  # of all ranks
    assert (config.ring, str(config.topology)) == ("outer", "gpu=2,tile=2")


@pytest.mark.parametrize(
    ("known", "values", "words"),
    [
        (None, {"ring": "across"}, ["--cocodiff_ring", "'across'", "outer, inner"]),
        (profile("2x2x2", 1e6, 1e7, FAST), {}, ["--cocodiff_profile", "node=2,gpu=2,tile=2", "node=2,gpu=4"]),
        (profile("2x4", 1e6, FAST), {"topology": "2x2"}, ["--cocodiff_profile", "node=2,gpu=4", "node=2,gpu=2"]),
    ],
)
def test_errors_name_option_value_and_valid_set(
    tmp_path: Path, known: Profile | None, values: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        settings(tmp_path, known, **values)
    assert all(word in str(caught.value) for word in words), caught.value
