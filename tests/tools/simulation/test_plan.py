"""Tests of `cocodiff plan`: divisibility, traffic, memory and step times, each against independent values."""

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks
from tests.quick import in_turn, slow
from tests.tools.simulation.test_simulate import shrink, step_flops
from tests.xdit.settings.test_ring_placement import profile
from tests.xdit.test_approximation import STEPS, LossyRun
from xfuser_cocodiff import cli
from xfuser_cocodiff.engine.codec.quantize import GRIDS
from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.reference_memory import GIB, default_budget
from xfuser_cocodiff.engine.topology.device_memory import DeviceMemory
from xfuser_cocodiff.engine.topology.plans import HEADS, KV, Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.simulation import assumed_change, plan, sharding
from xfuser_cocodiff.tools.simulation.collectives import sent_bytes
from xfuser_cocodiff.tools.simulation.communication import LayerCommunication
from xfuser_cocodiff.tools.simulation.machines import MACHINES
from xfuser_cocodiff.tools.simulation.scenario import STOCK, Scenario
from xfuser_cocodiff.tools.simulation.step_time import estimate_step, possible_splits, rank_splits
from xfuser_cocodiff.tools.simulation.workloads import WORKLOADS, find_workload
from xfuser_cocodiff.xdit.settings.config import Overlap
from xfuser_cocodiff.xdit.settings.resolve import resolve
from xfuser_cocodiff.xdit.settings.ring_placement import SequenceRanks, UlyssesRingSplit

FAST = 1e12


def make_scenario(model: str = "flux1", resolution: int = 1024, degree: int = 16, **more: Any) -> Scenario:
    return plan.make_scenario(model, resolution, ranks=degree, **{"machine": "aurora", **more})


# Heads and tokens.


@pytest.mark.parametrize(("model", "name"), in_turn([("sd35",), ("qwen-image",)], ("aurora", "pcie")))
def test_every_split_is_divisible_and_aligned_with_the_axes(model: str, name: str) -> None:
    machine = MACHINES[name]
    for nodes in (1, 2, 3, 4):
        scenario = make_scenario(model, 2304, nodes * machine.ranks_per_node, machine=name)
        splits = possible_splits(scenario, "exact")
        assert splits
        for split in splits:
            assert split.ulysses * split.ring == nodes * machine.ranks_per_node
            assert split.ulysses_topology(scenario.topology).size == split.ulysses
            assert split.ring_topology(scenario.topology).size == split.ring
        assert all(scenario.workload.heads % split.ulysses == 0 for split in possible_splits(scenario, STOCK))
        estimates = rank_splits(scenario, "balanced")
        assert {estimate.split for estimate in estimates} == {*splits}
        assert estimates[0].step_seconds == min(estimate.step_seconds for estimate in estimates)


@pytest.mark.parametrize(
    ("model", "resolution", "degree", "image", "queries", "keys", "attended", "phrases"),
    [
        ("flux.1-dev", 1024, 16, 256, 288, 288, 4608, []),
        (
            "flux.1-dev",
            768,
            24,
            96,
            608,
            608,
            24 * 608,
            ["512 text tokens", "attention sees 24 copies", "--max_sequence_length 504"],
        ),
        ("flux.1-dev", 1024, 24, 171, 683, 683, 24 * 683, ["64 rows", "xDiT fails; use", "a multiple of 384"]),
        ("sd3.5-large", 768, 24, 96, 429, 96, 2304 + 333, ["replicated on every rank", "one copy"]),
        ("qwen-image", 1024, 24, 171, 177, 177, 24 * 177, ["padded to 4104", "padded to 144"]),
        ("hunyuanvideo", 720, 24, 4950, 5206, 4950, 118800 + 256, ["one copy"]),
        ("wan2.1-14b", 720, 32, 2363, 2363, 2363, 32 * 2363, ["75600 image tokens are zero-padded to 75616"]),
    ],
)
def test_tokens_per_rank_and_remarks(
    model: str, resolution: int, degree: int, image: int, queries: int, keys: int, attended: int, phrases: list[str]
) -> None:
    shard = sharding.shard(WORKLOADS[model], resolution, degree)
    assert (shard.image, shard.queries, shard.keys, shard.attended) == (image, queries, keys, attended)
    text = " ".join([*shard.remarks, shard.problem or ""])
    assert all(phrase in text for phrase in phrases), text
    assert bool(shard.problem) == ("xDiT fails; use" in text)


# Traffic and memory.


def fraction_by_hand(head_dim: int) -> float:
    """Return the bytes of a run in `balanced` over those in bfloat16: packed levels, and a byte of scale a row."""
    per_unit = [GRIDS[bits].per_unit for bits in assumed_change.bits_of(modes.BALANCED, assumed_change.STEPS)]
    return sum(2 / each + 1 / head_dim for each in per_unit) / 2 / len(per_unit)


def test_traffic_equals_a_calculation_by_hand() -> None:
    """FLUX.1-dev at 1024 px on two nodes of 8 ranks, as 8 x 2 with the ring within nodes."""
    scenario = make_scenario(machine="ethernet-100")
    exact = estimate_step(scenario, UlyssesRingSplit(8, 2, "inner"), "exact")
    tensor = 57 * 288 * 24 * 128 * 2  # one tensor of all layers: 288 tokens, 24 heads of 128 values, two bytes
    assert exact.ring_bytes == {"gpu": 2 * tensor}  # K and V to the other rank of the ring
    assert exact.sent_bytes["node"] == pytest.approx(4 * tensor / 2)  # half of the ranks are in the other node
    flat, hierarchical = 4 * tensor * 3 / 8, 4 * tensor * 3 / 4
    assert exact.sent_bytes["gpu"] in (pytest.approx(flat), pytest.approx(hierarchical))
    encoded = estimate_step(scenario, UlyssesRingSplit(8, 2, "inner"), "balanced")
    assert encoded.sent_bytes["gpu"] == pytest.approx(4 * tensor * 3 / 4)  # fast axes first, without compression
    # Besides flags, alignment and last bytes.
    assert encoded.sent_bytes["node"] == pytest.approx(fraction_by_hand(128) * 4 * tensor / 2, rel=2e-3)


def test_traffic_with_gathered_kv_equals_a_calculation_by_hand() -> None:
    """FLUX.1-dev on two nodes of 8 ranks, without a ring: 24 heads, divided over the 8 ranks of a node only."""
    scenario = make_scenario(machine="ethernet-100")
    encoded = estimate_step(scenario, UlyssesRingSplit(16, 1), "balanced")
    tensor = 57 * 288 * 24 * 128 * 2
    assert encoded.gathered == ("node",)
    assert encoded.sent_bytes["gpu"] == pytest.approx(4 * tensor * 7 / 8)  # Q, K, V and O, lossless
    assert encoded.sent_bytes["node"] == pytest.approx(fraction_by_hand(128) * 2 * tensor, rel=1e-3)  # to one node
    predictor = 2 if modes.BALANCED.predictor else 1
    # K and V of both nodes, a byte for a value and for a row.
    assert encoded.reference_bytes == predictor * 2 * 2 * tensor // 2 * 129 // 128
    assert estimate_step(scenario, UlyssesRingSplit(16, 1), "paper").gathered == ()


def test_traffic_on_measured_slow_axes_is_compressed() -> None:
    """On Aurora these are the axes between nodes and between GPUs; in a DGX H100, none."""
    scenario = make_scenario("qwen-image", 1536, 24)
    assert scenario.slow_axes_of(scenario.topology) == ("node", "gpu")
    # A ring across nodes has no axis as slow as those between GPUs, beside which the one between nodes counts as slow.
    with_ring, exact = (estimate_step(scenario, UlyssesRingSplit(12, 2), mode) for mode in ("balanced", "exact"))
    assert with_ring.ring_bytes == exact.ring_bytes
    fraction = pytest.approx(fraction_by_hand(128), rel=5e-3)
    assert with_ring.sent_bytes["gpu"] / exact.sent_bytes["gpu"] == fraction
    across_gpus = UlyssesRingSplit(2, 12)
    with_ring, exact = (estimate_step(scenario, across_gpus, mode) for mode in ("balanced", "exact"))
    assert [with_ring.ring_bytes[axis] / exact.ring_bytes[axis] for axis in ("node", "gpu")] == [fraction, fraction]
    one_node = make_scenario("qwen-image", 1536, 8, machine="dgx-h100")
    balanced, exact = (estimate_step(one_node, UlyssesRingSplit(8, 1), mode) for mode in ("balanced", "exact"))
    assert balanced == dataclasses.replace(exact, mode="balanced")


SMALL = {
    "FLUX.1-dev": shrink("flux.1-dev", 8, 16, (2, 4)),
    "SD3.5": shrink("sd3.5-large", 8, 16, (6,)),
}
"""Models of `cocodiff models`. They have 8 pixels per token, so 128 pixels are as many tokens as 256 in a workload."""


def traffic_and_references(
    rank: int, model: str, mode: str, text: int, split: UlyssesRingSplit, whole: Topology, exchange: str
) -> tuple[dict[str, int], int, dict[str, str]]:
    """Return the bytes that a rank sends in a run along each axis, those of its link references, and the exchange."""
    from xfuser_cocodiff.tools.comparison import axis_collectives
    from xfuser_cocodiff.xdit.session.session import active

    degrees = ["--ulysses_degree", str(split.ulysses), "--ring_degree", str(split.ring)]
    flags = ["--use_cocodiff", "--cocodiff_ring", split.placement, "--cocodiff_topology", str(whole)]
    length = ["--max_sequence_length", str(text)] if model == "FLUX.1-dev" else []
    flags += ["--cocodiff_a2a", "flat"]
    run = LossyRun(rank, whole.size, model, *length, *degrees, *flags, dtype=torch.bfloat16)
    topology = split.ulysses_topology(whole)
    overlap = Overlap(v_first=False, head_groups=1)
    ring_topology = split.ring_topology(whole) if split.ring > 1 else None
    plan = Plan.hierarchical(topology)
    if exchange == KV:
        plan = dataclasses.replace(plan, gathers_kv=True)
    options = {"plan": plan, "overlap": overlap, "ring": split.placement}
    run.use_mode(mode, str(topology), **options, ring_topology=ring_topology)
    if run.runtime:  # else those of the model's own change
        run.runtime.fixed_bits = assumed_change.bits_of(run.runtime.schedule, STEPS)
    active().traffic.reset()
    run()
    reference_bytes = run.runtime.reports[-1].reference_bytes if run.runtime else 0
    return dict(active().traffic.sent_bytes), reference_bytes, axis_collectives.of_run(active())


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("model", "mode", "text", "split", "whole", "exchange"),
    [
        slow("FLUX.1-dev", "exact", 32, UlyssesRingSplit(4, 1), "2x2", HEADS),
        slow("FLUX.1-dev", "paper", 32, UlyssesRingSplit(4, 1), "2x2", HEADS),
        slow("FLUX.1-dev", "balanced", 32, UlyssesRingSplit(4, 1), "2x2", KV),
        slow("FLUX.1-dev", "balanced", 32, UlyssesRingSplit(2, 2, "outer"), "2x2", HEADS),
        slow("FLUX.1-dev", "fast", 32, UlyssesRingSplit(1, 4), "2x2", HEADS),
        slow("SD3.5", "fast", 333, UlyssesRingSplit(4, 1), "2x2", KV),  # replicated text, which only Q and O include
    ],
)
def test_estimates_equal_traffic_and_references_of_real_ranks(
    model: str, mode: str, text: int, split: UlyssesRingSplit, whole: str, exchange: str
) -> None:
    topology = Topology.parse(whole)
    links = profile(whole, *(1e3, FAST)[: len(topology.axes)])
    link_profile = dataclasses.replace(links, codec_bytes_per_second=FAST)  # the slow axis is the node axis, as on CPUs
    workload = dataclasses.replace(SMALL[model], text_tokens=text)
    scenario = Scenario(workload, 256, 1, STEPS, topology, lambda part, _: link_profile.restrict_to(part), None)
    estimate = estimate_step(scenario, split, mode)
    assert (KV if estimate.gathered else HEADS) == exchange
    if mode == "exact":
        tensors = [sent_bytes(Plan.hierarchical(topology), scenario.message_bytes(name)) for name in "qkvo"]
        expected = {axis: scenario.layer_calls * sum(sent[axis] for sent in tensors) for axis in tensors[0]}
    else:
        expected = Counter(estimate.sent_bytes) + Counter(estimate.ring_bytes)
    arguments = model, mode, text, split, topology, exchange
    for sent, reference_bytes, recorded in ranks.run(traffic_and_references, topology.size, *arguments):
        assert sent == {axis: pytest.approx(STEPS * size) for axis, size in expected.items()}
        assert reference_bytes == estimate.reference_bytes
        assert [axis for axis, how in recorded.items() if how == KV] == [*estimate.gathered]


# The command.

ARGUMENTS = ["plan", "--model", "FLUX.1-dev", "--resolution", "1024"]
ETHERNET = [*ARGUMENTS, "--nodes", "2", "--machine", "ethernet_100"]


def planned(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the command and return its record."""
    assert cli.main([*arguments, "--json", str(folder / "plan.json")]) == 0
    return json.loads((folder / "plan.json").read_text())


def test_a_table_has_best_stock_and_each_mode_in_its_fastest_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = planned(tmp_path, *ETHERNET)
    stock, _, paper, balanced, _ = record["rows"]
    assert [row["mode"] for row in record["rows"]] == ["stock", "exact", "paper", "balanced", "fast"]
    assert (stock["speedup"], paper["split"]["ring"], balanced["gathered"]) == (1, 2, ["node"])
    assert balanced["speedup"] == pytest.approx(stock["step_seconds"] / balanced["step_seconds"])
    assert balanced["coded_layers"] == balanced["layers"] == 57
    printed = capsys.readouterr().out
    assert "57 of 57" in printed and all(row["flags"] in printed for row in record["rows"])
    splits = planned(tmp_path, *ETHERNET, "--mode", "balanced")["rows"][1:]
    assert {row["mode"] for row in splits} == {"balanced"} and splits[0] == balanced and len(splits) > 5
    assert [row["step_seconds"] for row in splits] == sorted(row["step_seconds"] for row in splits)


@pytest.mark.parametrize("number", [2, 3])
def test_flags_are_valid_and_select_the_groups_of_the_split(number: int, tmp_path: Path) -> None:
    row = planned(tmp_path, *ETHERNET)["rows"][number]
    words = row["flags"].split()
    given = {words[i].lstrip("-"): words[i + 1] for i in range(len(words) - 1) if words[i].startswith("--cocodiff")}
    ulysses, ring = (int(words[words.index(flag) + 1]) for flag in ("--ulysses_degree", "--ring_degree"))
    flat = SequenceRanks(ulysses, Topology.flat(ulysses * ring), ring)
    config = resolve({"use_cocodiff": True, **given}, {}, flat)
    assert (config.ring, config.mode) == (row["split"]["placement"], row["mode"])
    assert config.topology == UlyssesRingSplit(**row["split"]).ulysses_topology(Topology.parse("node=2,gpu=8"))


def test_references_beyond_the_default_budget_leave_layers_lossless() -> None:
    """Without prediction where they do not fit, and layers of the second call then, whose references take more."""
    scenario = make_scenario("wan", 720, machine="ethernet-100")
    layer = LayerCommunication(scenario, UlyssesRingSplit(16, 1), "balanced")
    weights, tokens = scenario.workload.weight_bytes / GIB, 4 * 75600 / 16 * 5120 * 2 / GIB
    assert weights == pytest.approx(26.2, abs=0.1)
    sizes = (80, 44, 36, 30)
    memories = [DeviceMemory((size - weights) * GIB, size * GIB) for size in sizes]
    budgets = [default_budget(memory, layer.resharding.layer_sizes, True) / GIB for memory in memories]
    assert budgets == pytest.approx([size - weights - max(size / 16, 12 * tokens) for size in sizes])
    estimate = estimate_step(scenario, UlyssesRingSplit(16, 1), "balanced")
    predicted, single = (
        40 * sum(getattr(call, size) for call in layer.references()) / GIB for size in ("predicted", "single")
    )
    assert predicted == pytest.approx(estimate.reference_bytes / GIB)
    assert predicted == pytest.approx(18, abs=0.5)  # as README.md says
    assert predicted < budgets[0] and single < budgets[1] < predicted
    # Four parts of 129 bytes for 128 values; the second call also keeps two of the first, in two bytes a value.
    first, second = (part * single / 40 for part in (129 / 386, 257 / 386))
    found = [layer.coded_layers(budget * GIB) for budget in budgets]
    assert found == [80, 80, 40 + int((budgets[2] - 40 * first) / second), int(budgets[3] / first)]


def test_a_recorded_run_sets_the_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half the published change takes fewer bits; the run had as many steps as its record."""
    steps = [{"bits": None, "error": 0.006}]
    steps += [{"bits": 2, "error": GRIDS[2].distortion * change / 2} for change in assumed_change.PUBLISHED]
    (tmp_path / "rank0.json").write_text(json.dumps({"runs": [{"codecs": None}, {"codecs": steps}]}))
    published, own = (planned(tmp_path, *ETHERNET, *more) for more in ([], ["--record", str(tmp_path)]))
    printed = " ".join(capsys.readouterr().out.split())
    assert "for the published change per step of FLUX.1-dev; --record takes" in printed
    assert f"for the change per step of the run in {tmp_path}" in printed
    assert published["change_per_step"] == list(assumed_change.PUBLISHED)
    assert own["change_per_step"] == pytest.approx([each / 2 for each in assumed_change.PUBLISHED], abs=1e-3)
    for mode in (3, 4):
        assert own["rows"][mode]["sent_bytes"]["node"] < published["rows"][mode]["sent_bytes"]["node"]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (None, "rank0.json"),
        ('{"runs": [{"codecs": null}]}', "its last run sent no quantized residuals"),
    ],
)
def test_records_without_bits_are_errors(
    content: str | None, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content:
        (tmp_path / "rank0.json").write_text(content)
    assert cli.main([*ETHERNET, "--record", str(tmp_path)]) == 2
    found = capsys.readouterr().err
    assert f"--record {tmp_path} is not valid: " in found and cause in found
    assert "valid is the folder of COCODIFF_RECORD in a run in mode balanced or fast" in found


def test_profile_gives_communication_and_with_tflops_step_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"profile": profile("2x4", 1e9, 1e11).to_json()}))
    arguments = ["plan", "--model", "flux2", "--resolution", "1024", "--profile", str(file)]
    assert {row["step_seconds"] for row in planned(tmp_path, *arguments)["rows"]} == {None}
    best = planned(tmp_path, *arguments, "--tflops", "100")["rows"][1]
    # Copies at 1e11 bytes per second dominate the pointwise kernels.
    flops_seconds = step_flops(WORKLOADS["flux.2-dev"], 1024) / 8 / 1e14
    assert math.isfinite(best["speedup"]) and flops_seconds < best["compute_seconds"] < 10 * flops_seconds
    assert "speedup" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("host_seconds", "codec", "note"),
    [
        (0.0, 1e11, None),
        (1.0, 1e11, "coding would add more host time than it saves link time"),
        (0.0, 1e9, "no axis is slow"),
    ],
)
def test_a_plan_says_why_lossy_modes_code_nothing(
    host_seconds: float, codec: float, note: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    links = profile("2x4", 1e9, 1e11).with_codec(codec, host_seconds)
    (tmp_path / "links.json").write_text(json.dumps({"profile": links.to_json()}))
    arguments = ["plan", "--model", "flux2", "--resolution", "1024", "--profile", str(tmp_path / "links.json")]
    planned(tmp_path, *arguments)
    shown = " ".join(capsys.readouterr().out.split())
    assert ("code nothing" in shown) == bool(note) and (note or "") in shown


@pytest.mark.parametrize("name", ["flux1", "FLUX.1-dev", "black-forest-labs/FLUX.1-dev", "flux_1_dev"])
def test_a_model_has_the_names_that_users_run(name: str) -> None:
    assert find_workload(name) is WORKLOADS["flux.1-dev"]
