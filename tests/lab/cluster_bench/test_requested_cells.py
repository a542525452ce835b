"""Options of `cocodiff bench cluster`: lists, defaults, and errors that name option, value and valid set."""

import pytest

from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.bench.variant import parse_mode
from xfuser_cocodiff.lab.cluster_bench import requested_cells
from xfuser_cocodiff.lab.cluster_bench.requested_cells import RequestedCell
from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit


def parse(
    machine: str = "aurora",
    nodes: str = "2",
    model: str = "flux1",
    resolution: str = "768",
    modes: str | None = None,
    predicts: bool = False,
    dilation: float | None = None,
    batch: int = 1,
    layers: int = 1,
    launch_us: float | None = None,
    text_tokens: int | None = None,
) -> list[RequestedCell]:
    """Parse options as the command does."""
    cells = requested_cells.parse_cells(machine, nodes, model, resolution, batch, layers, launch_us, text_tokens)
    return requested_cells.request(cells, modes, predicts, dilation)


def test_lists_give_all_combinations() -> None:
    cells = [each.cell for each in parse("aurora,ethernet-100", "1,2", "flux1,sd35", "768,1536", "exact")]
    assert len(cells) == 16
    assert (cells[0].machine.name, cells[-1].machine.name) == ("aurora", "ethernet-100")
    assert [(cell.nodes, cell.model, cell.resolution) for cell in cells[:3]] == [
        (1, "flux.1-dev", 768),
        (1, "flux.1-dev", 1536),
        (1, "sd3.5-large", 768),
    ]


def test_variants_that_do_not_apply_are_no_default() -> None:
    one_node, two_nodes = parse("dgx-h100", "1,2")
    named = {f"{mode}@slow_axes=node" for mode in ("balanced", "fast", "paper")}  # measured, the axis is not slow
    assert set(two_nodes.modes) - set(one_node.modes) == {*named, "kv-gather", "compact-ring"}
    assert {"best_stock", "exact", "v-first", "fp8", "fp4", "int8"} <= set(one_node.modes)
    assert {each.name for each in two_nodes.variants} >= {*two_nodes.modes} - {"best_stock", "best_exact"}


def test_lossy_modes_have_one_row_where_the_axes_of_the_machine_are_those_measured_as_slow() -> None:
    [two_nodes] = parse("aurora", "2", resolution="1152")
    assert [mode for mode in two_nodes.modes if mode.startswith("balanced")] == ["balanced"]


def test_lossy_modes_compress_on_slow_axes_within_a_node() -> None:
    [one_node] = parse("pcie", "1", resolution="1024")
    assert [mode for mode in one_node.modes if "slow" in mode] == [
        f"{mode}@slow_axes=gpu" for mode in ("balanced", "fast", "paper")
    ]


def test_other_splits_of_a_mode_may_have_zero_padded_heads() -> None:
    [sd35] = parse(model="sd35", modes="exact,best_exact", resolution="1536")  # 38 heads on 12 ranks
    usual, *others = sd35.variants
    assert usual.name == "exact" and 38 % usual.split.ulysses == 0
    assert all(each.mode == "exact" and each.split != usual.split for each in others)
    assert any(38 % each.split.ulysses for each in others)


def test_variants_are_added_to_the_default_ones() -> None:
    [default], [more] = parse(), parse(modes="default,exact@v_first=off@head_groups=1")
    assert more.modes == (*default.modes, "exact@v_first=off@head_groups=1")


def test_a_schedule_with_one_coded_step_is_valid() -> None:
    [requested] = parse(modes="balanced@schedule=warmup=27")
    assert requested.modes == ("balanced@schedule=warmup=27",)


def test_rules_with_a_ring_run_where_heads_do_not_divide_by_the_ranks_of_a_node() -> None:
    [requested] = parse(model="sd35")  # 38 heads
    splits = {each.name: each.split for each in requested.variants}
    assert 38 % splits["kv-gather"].ulysses == 0 and splits["kv-gather"].ring > 1


def test_launch_time_replaces_that_of_the_accelerator() -> None:
    [graphs], [eager] = parse(launch_us=0), parse()
    assert graphs.cell.machine.accelerator.launch_seconds == 0 < eager.cell.machine.accelerator.launch_seconds
    assert graphs.cell.machine.accelerator.bytes_per_second == eager.cell.machine.accelerator.bytes_per_second


def test_a_size_that_xdit_cannot_run_is_kept_beside_others() -> None:
    possible, impossible = parse(resolution="768,800")
    assert possible.problem is None
    assert "2500 image tokens are not divisible by 24" in str(impossible.problem)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"machine": "aurora,frontier"}, "--machine 'frontier' is not valid; valid are aurora, dgx-h100"),
        ({"nodes": "two"}, "--nodes 'two' is not valid"),
        ({"nodes": "0"}, "--nodes 0 is not valid; it must be 1 or more"),
        ({"nodes": "8"}, "--nodes 8 is not valid: 96 ranks .* valid are 1, 2, or more with --predict"),
        ({"model": "sdxl"}, "--model 'sdxl' is not valid; valid are flux.1-dev"),
        ({"resolution": "1000"}, "--resolution 1000 is not valid; it must be a positive multiple of 16"),
        ({"resolution": "800"}, "--resolution 800 and --nodes 2 is not valid on aurora: 2500 image"),
        ({"batch": 0}, "--batch 0 is not valid"),
        ({"text_tokens": 64, "model": "wan"}, "--text_tokens 64 is not valid: the sequence of wan2.1-14b has no text"),
        ({"text_tokens": 500, "model": "flux2"}, "500 text tokens are not divisible by 24: xDiT fails"),
        ({"layers": 0}, "--layers 0 is not valid"),
        ({"launch_us": -1.0}, "--launch_us -1 is not valid; valid are microseconds from 0"),
        (
            {"modes": "exact,quick"},
            "--modes 'quick' is not valid; valid are default, best_stock, .*fp4.*balanced",
        ),
        ({"modes": "best_stock@v_first=on"}, "--modes 'best_stock@v_first=on' is not valid; valid are default"),
        ({"modes": "exact@color=red"}, "'color' is not valid after @"),
        (
            {"modes": "exact,balanced@schedule=warmup=28"},
            "--modes 'balanced@schedule=warmup=28' is not valid: all 28 steps are keyframes",
        ),
        ({"modes": "paper@schedule=warmup=1;refresh=1"}, "refresh=1' is not valid: all 28 steps are keyframes"),
        ({"modes": "kv-gather", "nodes": "1"}, "--modes 'kv-gather' needs several nodes.*; valid rules are .*fp4"),
        ({"dilation": 0.5}, "--dilation 0.5 is not valid for 2 nodes of aurora; valid are"),
        ({"dilation": 1e9}, r"--dilation 1e\+09 is not valid"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_errors_name_option_value_and_valid_set(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(**options)


def test_text_that_xdit_cannot_shard_is_shortened() -> None:
    """A user would set --max_sequence_length as xDiT's error says."""
    [default], [shorter], [replicated] = parse(model="flux2"), parse(model="flux2", text_tokens=240), parse()
    assert [each.cell.workload.text_tokens for each in (default, shorter, replicated)] == [504, 240, 512]
    assert default.problem is None and default.cell.scenario.workload.text_tokens == 504


def test_many_ranks_can_be_predicted() -> None:
    [requested] = parse(nodes="4", predicts=True)
    assert requested.cell.topology.size == 48


@pytest.mark.parametrize("mode", ["balanced", "exact"])
def test_a_semicolon_in_a_plan_stands_for_a_comma(mode: str) -> None:
    name = f"{mode}/hierarchical:gpu;node=kv"
    config = parse_mode(name, Topology.parse("2x8"), UlyssesRingSplit(16, 1))
    assert (str(config.plan), config.mode) == ("hierarchical:gpu,node=kv", mode)
    by_heads = parse_mode(f"{mode}/hierarchical", Topology.parse("2x8"), UlyssesRingSplit(16, 1))
    assert not by_heads.plan.gathers_kv
    with pytest.raises(ValueError, match="must gather K and V along the outermost axis, node"):
        parse_mode(f"{mode}/hierarchical:node;gpu=kv", Topology.parse("2x8"), UlyssesRingSplit(16, 1))
