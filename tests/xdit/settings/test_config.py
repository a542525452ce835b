"""Flags and variables resolve to a config, or to an error that names them."""

import pytest

from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.settings import parsers
from xfuser_cocodiff.xdit.settings.config import Overlap
from xfuser_cocodiff.xdit.settings.resolve import default_slow_axes, resolve
from xfuser_cocodiff.xdit.settings.ring_placement import SequenceRanks
from xfuser_cocodiff.xdit.settings.variables import collectives_are_synchronous

FLAT = Topology.flat(4)


def test_config_is_none_unless_enabled() -> None:
    assert resolve({}, {}, SequenceRanks(4, FLAT)) is None
    assert resolve({"cocodiff_topology": "nonsense"}, {"COCODIFF_ENABLE": "0"}, SequenceRanks(4, FLAT)) is None


def test_flags_take_precedence_over_variables() -> None:
    environment = {"COCODIFF_ENABLE": "1", "COCODIFF_TOPOLOGY": "4", "COCODIFF_A2A": "flat", "COCODIFF_MODE": "exact"}
    from_variables = resolve({}, environment, SequenceRanks(4, FLAT))
    assert str(from_variables.topology) == "node=4"
    assert str(from_variables.plan) == "flat"
    from_flags = resolve(
        {"cocodiff_topology": "2x2", "cocodiff_a2a": "hierarchical"}, environment, SequenceRanks(4, FLAT)
    )
    assert str(from_flags.topology) == "node=2,gpu=2"
    assert from_flags.plan == Plan.hierarchical(from_flags.topology)


def test_memory_budget_is_in_gib() -> None:
    config = resolve({"cocodiff_memory_budget": "2.5"}, {"COCODIFF_ENABLE": "1"}, SequenceRanks(4, FLAT))
    assert config.memory_budget == 2_684_354_560


@pytest.mark.parametrize(
    ("values", "environment", "words"),
    [
        ({"cocodiff_topology": "2x3"}, {}, ["--cocodiff_topology", "2x3", "degree is 4"]),
        ({"cocodiff_a2a": "ring"}, {}, ["--cocodiff_a2a", "ring", "'auto'", "'flat'", "'hierarchical'"]),
        ({}, {"COCODIFF_MODE": "slow"}, ["COCODIFF_MODE", "slow", "exact", "paper", "balanced", "fast"]),
        (
            {"cocodiff_mode": "fast", "cocodiff_schedule": "bits=3"},
            {},
            ["--cocodiff_schedule", "'3'", "1, 1.6, 2, 2.7, 3.2, 4, 5.3, 8"],
        ),
        ({"cocodiff_timeout": "0"}, {}, ["--cocodiff_timeout", "'0'", "seconds above 0, up to 1e+08"]),
        ({"use_cocodiff": False}, {"COCODIFF_ENABLE": "maybe"}, ["COCODIFF_ENABLE", "maybe", "true"]),
    ],
)
def test_errors_name_option_value_and_valid_set(values: dict, environment: dict, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"valid|degree|known") as caught:
        resolve({"use_cocodiff": True, **values}, environment, SequenceRanks(4, FLAT))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("topology", "ring", "virtual", "given", "expected"),
    [
        ("node=2,gpu=2", None, False, None, ("node",)),
        ("node=1,gpu=4", None, False, None, ()),
        ("gpu=4", "node=2", False, None, ("node",)),
        ("node=2,gpu=2", None, False, "gpu,node", ("gpu", "node")),
        ("node=2,gpu=2", None, False, "auto", ("auto",)),
        ("gpu=4", "node=2", False, "node, gpu", ("node", "gpu")),
        ("node=2,gpu=3,tile=2", None, True, None, ("node", "gpu")),
    ],
)
def test_default_and_given_slow_axes(
    topology: str, ring: str | None, virtual: bool, given: str | None, expected: tuple[str, ...]
) -> None:
    parsed, ring_topology = Topology.parse(topology), Topology.parse(ring) if ring else None
    if given:
        assert parsers.slow_axes(given, parsed, ring_topology) == expected
    else:
        assert default_slow_axes(parsed, ring_topology, virtual) == expected


@pytest.mark.parametrize("given", ["gpu", "node,tile"])
def test_slow_axes_inside_fast_ones_are_refused(given: str) -> None:
    topology = Topology.parse("node=2,gpu=3,tile=2")
    values = {"use_cocodiff": True, "cocodiff_slow_axes": given}
    valid = rf"of {topology} valid are 'auto', 'node', 'node,gpu', 'node,gpu,tile'$"
    with pytest.raises(ValueError, match=rf"^--cocodiff_slow_axes: '{given}' is not valid: .* outermost .*{valid}"):
        resolve(values, {}, SequenceRanks(12, topology))


@pytest.mark.parametrize(
    ("device_type", "given", "expected"),
    [("cpu", None, ("node",)), ("cuda", None, ("auto",)), ("xpu", None, ("auto",)), ("cuda", "node", ("node",))],
)
def test_slow_axes_are_measured_on_accelerators(device_type: str, given: str | None, expected: tuple[str, ...]) -> None:
    values = {"use_cocodiff": True, "cocodiff_mode": "fast", "cocodiff_slow_axes": given}
    assert resolve(values, {}, SequenceRanks(4, Topology.parse("2x2")), device_type).slow_axes == expected


@pytest.mark.parametrize(
    ("variables", "mode"),
    [({}, "balanced"), ({"LOCAL_WORLD_SIZE": "4"}, "exact"), ({"LOCAL_WORLD_SIZE": "2"}, "balanced")],
    ids=["Ray", "one node", "two nodes"],
)
def test_given_nodes_decide_the_default_mode_unless_the_launcher_shows_one_node(variables: dict, mode: str) -> None:
    """On one node, the axis `node` may stand for sockets."""
    whole, ring = SequenceRanks(4, FLAT), SequenceRanks(2, FLAT, 2)
    for topology, ranks in (("2x2", whole), ("2x2", ring), ("node=2", ring)):
        values = {"use_cocodiff": True, "cocodiff_topology": topology}
        assert resolve(values, variables, ranks, "cpu").mode == mode
        assert resolve({**values, "cocodiff_topology": "flat"}, variables, ranks, "cpu").mode == "exact"


def test_overlap_options() -> None:
    def overlap(**options: str) -> Overlap:
        values = {"use_cocodiff": True, **{f"cocodiff_{name}": value for name, value in options.items()}}
        return resolve(values, {}, SequenceRanks(2, Topology.flat(2))).overlap

    assert overlap() == overlap(v_first="auto", head_groups="auto") == Overlap()
    assert overlap(v_first="on", head_groups="4") == Overlap(v_first=True, head_groups=4)
    assert overlap(v_first="off").v_first is False


def test_an_error_replaces_that_of_the_mode() -> None:
    values = {"use_cocodiff": True, "cocodiff_error": "0.05"}
    ranks = SequenceRanks(4, Topology.parse("node=2,gpu=2"))

    def schedule(**more: str) -> str | None:
        return resolve({**values, **more}, {}, ranks, "cpu").schedule

    for mode in ("balanced", "fast"):
        assert CodecSchedule.parse(schedule(cocodiff_mode=mode), modes.PRESETS[mode]).error == 0.05
    for more, message in (
        ({"cocodiff_mode": "exact"}, "'error=0.05' has no effect in the mode exact"),
        ({"cocodiff_mode": "paper"}, "'0.05' has no effect in the mode paper"),
        ({"cocodiff_schedule": "bits=2"}, "has 'bits' and 'error'"),
    ):
        with pytest.raises(ValueError, match=f"--cocodiff_error.*{message}"):
            schedule(**more)


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("0", False), ("1", True), ("true", True), ("", False)])
def test_synchronous_collectives(value: str | None, expected: bool) -> None:
    assert collectives_are_synchronous({} if value is None else {"CCL_OP_SYNC": value}) == expected
