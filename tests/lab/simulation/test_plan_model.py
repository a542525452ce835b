"""`cocodiff plan --model`: divisibility, traffic, memory and times, each against a truth of its own."""

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks
from tests.engine.settings.test_ring_placement import profile
from tests.lab.simulation.test_simulate import flops
from tests.quick import slow
from tests.xdit.test_approximation import STEPS, Approximating
from xfuser_cocodiff import cli
from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes, ReferenceBytes
from xfuser_cocodiff.engine.settings.config import Overlap, resolve
from xfuser_cocodiff.engine.settings.ring_placement import SequenceRanks, UlyssesRingSplit
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.simulation import plan_model, sharding
from xfuser_cocodiff.lab.simulation.machines import MACHINES
from xfuser_cocodiff.lab.simulation.step_time import STOCK, Case, predict, predictions, splits
from xfuser_cocodiff.lab.simulation.workloads import WORKLOADS, Workload

FAST = 1e12


def case_of(model: str = "flux1", resolution: int = 1024, degree: int = 16, **more: Any) -> Case:
    return plan_model.case_of(model, resolution, degree, **{"cluster": "aurora", **more})


# Heads and tokens.


@pytest.mark.parametrize("cluster", MACHINES)
@pytest.mark.parametrize("model", [*plan_model.ALIASES, "qwen-image"])
def test_every_split_divides_and_lies_on_the_axes(model: str, cluster: str) -> None:
    machine = MACHINES[cluster]
    for nodes in (1, 2, 3, 4):
        case = case_of(model, 2304, nodes * machine.ranks_per_node, cluster=cluster)
        found = splits(case, "exact")
        assert found
        for split in found:
            assert split.ulysses * split.ring == nodes * machine.ranks_per_node
            assert split.ulysses_topology(case.topology).size == split.ulysses
            assert split.ring_topology(case.topology).size == split.ring
        assert all(case.workload.heads % split.ulysses == 0 for split in splits(case, STOCK))
        rows = predictions(case, None)
        assert {(row.ulysses, row.ring, row.placement) for row in rows} == {
            (split.ulysses, split.ring, split.placement) for split in found
        }
        assert rows[0].step_seconds == min(row.step_seconds for row in rows)


def test_heads_are_those_of_the_model() -> None:
    """xDiT pads none: 38 heads divide by 1, 2, 19 and 38 only."""
    assert case_of("sd35", degree=12).workload.heads == 38
    assert sharding.ulysses_degrees(38, 24) == [1, 2]
    assert sharding.ulysses_degrees(24, 96) == [1, 2, 3, 4, 6, 8, 12, 24]


@pytest.mark.parametrize(
    ("model", "resolution", "degree", "image", "queries", "keys", "attended", "words"),
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
            ["512 text tokens", "sees them 24 times", "--max_sequence_length 504"],
        ),
        ("flux.1-dev", 1024, 24, 171, 683, 683, 24 * 683, ["4096 image tokens", "xDiT fails", "the plugin pads"]),
        ("flux.2-dev", 1024, 24, 171, 193, 193, 24 * 193, ["padded to 4104", "--max_sequence_length 504"]),
        ("sd3.5-large", 768, 24, 96, 429, 96, 2304 + 333, ["every rank has all of them", "once"]),
        ("sd3.5-large", 1024, 24, 171, 504, 171, 24 * 171 + 333, ["64 rows", "768 px and 1152 px"]),
        ("qwen-image", 1024, 24, 171, 177, 177, 24 * 177, ["padded to 4104", "padded to 144"]),
    ],
)
def test_tokens(
    model: str, resolution: int, degree: int, image: int, queries: int, keys: int, attended: int, words: list[str]
) -> None:
    held = sharding.shard(WORKLOADS[model], resolution, degree)
    assert (held.image, held.queries, held.keys, held.attended) == (image, queries, keys, attended)
    said = " ".join([*held.remarks, held.problem or ""])
    assert all(word in said for word in words), said
    assert bool(held.problem) == ("would do" in said)


def test_what_is_proposed_would_do() -> None:
    for resolution in (768, 1152):
        assert sharding.shard(WORKLOADS["sd3.5-large"], resolution, 24).problem is None
    shorter = dataclasses.replace(WORKLOADS["flux.2-dev"], text_tokens=504)
    assert sharding.shard(shorter, 1024, 24).problem is None


# Bytes and memory.


def test_traffic_by_hand() -> None:
    """FLUX.1-dev, 1024 px, 16 ranks as two nodes of 8, 8 x 2 with the ring inside, exact."""
    case = case_of(cluster="ethernet")
    found = predict(case, UlyssesRingSplit(8, 2, "inner"), "exact")
    one = 57 * 288 * 24 * 128 * 2  # a tensor of all layers: 288 tokens of 24 heads of 128 values in two bytes
    assert found.ring_bytes == {"gpu": 2 * one}  # K and V to the one other rank
    assert found.sent_bytes["node"] == pytest.approx(4 * one / 2)  # half of all ranks are in the other node
    flat, by_axis = 4 * one * 3 / 8, 4 * one * 3 / 4
    assert found.sent_bytes["gpu"] in (pytest.approx(flat), pytest.approx(by_axis))
    encoded = predict(case, UlyssesRingSplit(8, 2, "inner"), "balanced")
    assert encoded.sent_bytes["gpu"] == pytest.approx(4 * one * 3 / 4)  # all of it goes along fast axes first
    # A step in 8 bits, then 1.6 for Q, 2 for K and V and 2.7 for O; and a byte for each 128 values.
    first, later = 4 * 128, 26 + 2 * 32 + 43
    share = (first + 49 * later + 50 * 4) / (4 * 256) / 50
    assert encoded.sent_bytes["node"] == pytest.approx(share * 4 * one / 2, rel=1e-3)  # with flags and gaps


def test_heads_that_are_added_travel_too() -> None:
    """FLUX.1-dev's 24 heads on 16 ranks are two on each, 32 in all."""
    found = predict(case_of(cluster="ethernet"), UlyssesRingSplit(16, 1), "exact")
    assert found.sent_bytes["node"] == pytest.approx(57 * 4 * 288 * 32 * 128 * 2 / 2)  # half of it to the other node


def test_what_is_coded_depends_on_nodes_alone() -> None:
    """Aurora's links between GPUs are slow by a profile's measure too, but a run without --cocodiff_slow_axes codes and
    holds only what crosses nodes, and nothing in one node."""
    case = case_of("qwen-image", 1536, 24)
    assert case.slow_axes == ("node",) != case.profile_of(case.topology, 1e6).slow_axes
    coded = predict(case, UlyssesRingSplit(24, 1), "balanced")
    values = 24 * 128 * (96**2 // 24 + 6)
    need = ReferenceBytes.of(LayerSizes(4 * values, values, 128, 2), modes.preset("balanced", 50), places=2)
    assert (coded.reference_bytes, coded.compact_reference_bytes) == (need.full * 120, need.compact * 120)
    inside = case_of("qwen-image", 1536, 12)
    one, other = (predict(inside, UlyssesRingSplit(12, 1), mode) for mode in ("balanced", "exact"))
    assert one == dataclasses.replace(other, mode="balanced")


SMALL = {
    "FLUX.1-dev": Workload("flux.1-dev", 6, 8, 16, mlp_ratio=4, gated=False, text_tokens=32),
    "SD3.5": Workload("sd3.5-large", 4, 24, 8, mlp_ratio=4, gated=False, text_tokens=333, rows=2),
}
"""Models of `cocodiff models`. At 128 pixels they have the tokens of 256 here: theirs are half as wide."""


def moved_by_ranks(
    rank: int, model: str, mode: str, text: int, split: UlyssesRingSplit, whole: Topology
) -> tuple[dict[str, int], int]:
    """What a rank sends in a run, and what references it then holds."""
    from xfuser_cocodiff.xdit.session.session import active

    degrees = ["--ulysses_degree", str(split.ulysses), "--ring_degree", str(split.ring)]
    flags = ["--use_cocodiff", "--cocodiff_ring", split.placement, "--cocodiff_topology", str(whole)]
    length = ["--max_sequence_length", str(text)] if model == "FLUX.1-dev" else []
    flags += ["--cocodiff_a2a", "flat"]
    run = Approximating(rank, whole.size, model, *length, *degrees, *flags, dtype=torch.bfloat16)  # of a case's values
    topology = split.ulysses_topology(whole)
    overlap = Overlap(v_first=False, head_groups=1)
    around = split.ring_topology(whole) if split.ring > 1 else None
    options = {"plan": Plan.hierarchical(topology), "overlap": overlap, "ring": split.placement}
    run.by(mode, str(topology), **options, ring_topology=around)
    active().traffic.reset()
    run()
    held = run.runtime.reports[-1].reference_bytes if run.runtime else 0
    return dict(active().traffic.sent_bytes), held


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("model", "mode", "text", "split", "whole"),
    [
        slow("FLUX.1-dev", "exact", 32, UlyssesRingSplit(4, 1), "2x2"),
        slow("FLUX.1-dev", "balanced", 32, UlyssesRingSplit(4, 1), "2x2"),
        slow("FLUX.1-dev", "fast", 32, UlyssesRingSplit(2, 1), "node=2"),
        slow("FLUX.1-dev", "fast", 32, UlyssesRingSplit(4, 1), "2x2"),
        slow("FLUX.1-dev", "balanced", 32, UlyssesRingSplit(2, 2, "inner"), "2x2"),
        slow("FLUX.1-dev", "balanced", 32, UlyssesRingSplit(2, 2, "outer"), "2x2"),
        slow("FLUX.1-dev", "fast", 32, UlyssesRingSplit(1, 4), "2x2"),
        slow("SD3.5", "fast", 333, UlyssesRingSplit(4, 1), "2x2"),  # every rank has all text, beside Q and O alone
    ],
)
def test_ranks_send_and_hold_what_is_foreseen(
    model: str, mode: str, text: int, split: UlyssesRingSplit, whole: str
) -> None:
    topology = Topology.parse(whole)
    known = profile(whole, *(1e3, FAST)[: len(topology.axes)])
    workload = dataclasses.replace(SMALL[model], text_tokens=text)
    case = Case(workload, 256, 1, STEPS, topology, lambda part, _: known.restrict_to(part), None)
    found = predict(case, split, mode)
    if mode == "exact":
        sent = [Plan.hierarchical(topology).sent_bytes(case.message_bytes(name)) for name in "qkvo"]
        expected = {axis: case.layer_calls * sum(each[axis] for each in sent) for axis in sent[0]}
    else:
        expected = Counter(found.sent_bytes) + Counter(found.ring_bytes)
    for sent, held in ranks.run(moved_by_ranks, topology.size, model, mode, text, split, topology):
        assert sent == {axis: pytest.approx(STEPS * size) for axis, size in expected.items()}
        assert held == found.reference_bytes


# The command.


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "plan.json"
    arguments = ["plan", "--model", "flux1", "--resolution", "1024", "--degree", "16", "--cluster", "ethernet"]
    assert cli.main([*arguments, "--json", str(record)]) == 0
    shown, written = capsys.readouterr().out, json.loads(record.read_text())
    assert written["flags"] in shown
    assert written["stock"]["step_seconds"] > written["splits"][0]["step_seconds"]
    assert [row["mode"] for row in written["modes"]] == ["exact", "paper", "balanced", "fast"]
    best = written["splits"][0]
    assert best["speedup"] == pytest.approx(written["stock"]["step_seconds"] / best["step_seconds"])
    # The flags are ones that the plugin takes, and they give the groups that were planned for.
    words = written["flags"].split()
    given = {words[i].lstrip("-"): words[i + 1] for i in range(len(words) - 1) if words[i].startswith("--cocodiff")}
    ulysses, ring = (int(words[words.index(flag) + 1]) for flag in ("--ulysses_degree", "--ring_degree"))
    flat = SequenceRanks(ulysses, Topology.flat(ulysses), ring, Topology.flat(ulysses * ring))
    found = resolve({"use_cocodiff": True, **given}, {}, flat)
    assert (str(found.topology), found.ring, found.mode) == (best["topology"], best["placement"], best["mode"])


def test_a_profile_tells_communication_and_with_a_speed_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, record = tmp_path / "profile.json", tmp_path / "plan.json"
    file.write_text(json.dumps({"profile": profile("2x4", 1e9, 1e11).to_json()}))
    arguments = ["plan", "--model", "flux2", "--resolution", "1024", "--degree", "8", "--profile", str(file)]
    assert cli.main([*arguments, "--json", str(record)]) == 0
    assert "speedup" in capsys.readouterr().out
    assert {row["step_seconds"] for row in json.loads(record.read_text())["splits"]} == {None}
    assert cli.main([*arguments, "--json", str(record), "--tflops", "100"]) == 0
    rows = json.loads(record.read_text())["splits"]
    assert all(math.isfinite(row["speedup"]) for row in rows)
    assert rows[0]["compute_seconds"] == pytest.approx(flops(WORKLOADS["flux.2-dev"], 1024) / 8 / 1e14)


MODEL = "--model flux1 --resolution 1024"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model flux9 --resolution 1024 --degree 12 --cluster aurora", ["--model 'flux9'", "flux1", "qwen-image"]),
        ("--model flux1 --degree 12 --cluster aurora", ["--resolution"]),
        ("--model flux1 --resolution 1000 --degree 12 --cluster aurora", ["--resolution 1000", "16"]),
        (f"{MODEL} --degree 8", ["--cluster, one of aurora, dgx-h100, pcie, ethernet", "--profile"]),
        (f"{MODEL} --degree 8 --cluster pcie --profile file", ["one machine", "--profile"]),
        (f"{MODEL} --degree 1 --cluster aurora", ["--degree 1"]),
        (f"{MODEL} --degree 16 --cluster aurora", ["--degree 16", "aurora", "gpu=6,tile=2"]),
        (f"{MODEL} --degree 8 --cluster aurora --topology 2x3", ["6 ranks", "--degree is 8"]),
        (f"{MODEL} --degree 8 --cluster aurora --topology flat", ["--topology flat"]),
        (f"{MODEL} --degree 12 --cluster aurora --mode slow", ["--mode 'slow'", "balanced"]),
        (f"{MODEL} --degree 12 --cluster abacus", ["'abacus'", "aurora"]),
        (f"{MODEL} --degree 12 --cluster aurora --tflops 0", ["--tflops 0"]),
        (f"{MODEL} --degree 12 --cluster aurora --text-tokens 0", ["--text-tokens 0"]),
        (f"{MODEL} --degree 12 --profile none.json", ["none.json"]),
        ("--degree 12", ["--degree goes with --model"]),
    ],
)
def test_errors(arguments: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
