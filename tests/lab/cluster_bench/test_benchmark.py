"""Cells of `cocodiff bench cluster`: recorded and measured, kept in a file, and not measured again."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lab.cluster_bench.programs import one_block
from tests.lab.emulation.requirement import needs_namespaces
from xfuser_cocodiff import cli
from xfuser_cocodiff.lab.cluster_bench import benchmark, requested_cells
from xfuser_cocodiff.lab.cluster_bench.benchmark import Conditions
from xfuser_cocodiff.lab.cluster_bench.measurement import MeasuredProgram, MeasuredSplit, MeasuredVariant
from xfuser_cocodiff.lab.cluster_bench.quality_record import QualityRecord
from xfuser_cocodiff.lab.cluster_bench.recorded_times import predict_step
from xfuser_cocodiff.lab.cluster_bench.recording import RecordedSplit, Recording
from xfuser_cocodiff.lab.cluster_bench.rules import RULES
from xfuser_cocodiff.lab.cluster_bench.scaling import full_step_seconds
from xfuser_cocodiff.lab.emulation import forked_ranks
from xfuser_cocodiff.lab.reporting.progress import ProgressReporter

KEYS = {"machine", "nodes", "ranks", "model", "resolution", "batch", "rows"}
"""Keys of a cell that other programs read."""
COUNTS = {"block": 40}
DEADLINE = 300
"""Seconds after which a test gives up: a guard against hangs, not a bound on speed."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace recording and measurement by steps made by hand; return the calls so far."""
    seen = []

    def record_split(cell: Any, split: Any, variants: Any) -> RecordedSplit:
        seen.append(f"record {cell.resolution} {split.ulysses}x{split.ring}")
        if cell.resolution == 960:
            raise RuntimeError("no memory")
        step = one_block(cell.topology.size, 100_000, 0.001, 0.001)
        return RecordedSplit({each.name: Recording({"step": step}, {"step": 1.0}) for each in variants}, COUNTS)

    def measure_split(cell: Any, recorded: RecordedSplit, speed: Any) -> MeasuredSplit:
        seen.append(f"measure {cell.resolution} at {speed.dilation:g}, {speed.repeats} times")
        measured = {}
        for name, recording in recorded.recordings.items():
            seconds = full_step_seconds(cell, COUNTS, predict_step(cell, recording.programs["step"]))
            program = MeasuredProgram([seconds] * speed.repeats, seconds)
            measured[name] = MeasuredVariant({"step": program}, {"step": 1.0}, {})
        return MeasuredSplit(measured, 0.6, {"gpu": 1.0, "node": 1.0}, {"gpu": 1.0, "node": 1.0})

    monkeypatch.setattr(benchmark, "record_split", record_split)
    monkeypatch.setattr(benchmark, "measure_split", measure_split)
    monkeypatch.setattr(benchmark.transformer_wrappers, "preload", lambda name: None)
    return seen


def requested(resolution: str, modes: str = "exact,fp4") -> list[requested_cells.RequestedCell]:
    """Return cells of one node of eight ranks."""
    cells = requested_cells.parse_cells("dgx-h100", "1", "wan", resolution)
    return requested_cells.request(cells, modes, predicts=False)


def test_a_cell_has_all_keys_and_one_row_per_variant(calls: list[str]) -> None:
    cell = benchmark.run(requested("480")[0], Conditions(dilation=500, repeats=2))
    assert cell.keys() >= KEYS
    assert (cell["machine"], cell["nodes"], cell["ranks"]) == ("dgx-h100", 1, 8)
    assert [row["mode"] for row in cell["rows"]] == ["stock", "exact", "fp4"]
    assert all(row["valid"] and len(row["step_seconds"]) == 2 for row in cell["rows"])
    assert calls == ["record 480 8x1", "measure 480 at 500, 2 times"]


def test_slow_variants_have_a_lower_dilation_of_their_own(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    record = benchmark.record_split

    def record_split(cell: Any, split: Any, variants: Any) -> RecordedSplit:
        recorded = record(cell, split, variants)
        slow = one_block(cell.topology.size, 100_000, 0.1, 0.1)
        return replace(recorded, recordings={**recorded.recordings, "stock": Recording({"step": slow}, {"step": 1.0})})

    monkeypatch.setattr(benchmark, "record_split", record_split)
    cell = benchmark.run(requested("480")[0], Conditions())
    stock, exact, fp4 = (row["dilation"] for row in cell["rows"])
    assert stock < exact == fp4
    assert len([call for call in calls if call.startswith("measure")]) == 2


def test_prediction_needs_no_cluster(calls: list[str]) -> None:
    cell = benchmark.run(requested("480")[0], Conditions(predicts=True))
    assert calls == ["record 480 8x1"]
    assert cell["predicted"] and {row["dilation"] for row in cell["rows"]} == {None}
    assert all(row["step_seconds"] is None and row["predicted_seconds"] > 0 for row in cell["rows"])


def test_finished_cells_are_kept_and_not_measured_again(calls: list[str], tmp_path: Path) -> None:
    file, conditions, progress = tmp_path / "record.json", Conditions(dilation=500), ProgressReporter(None)

    def run(cells: list[requested_cells.RequestedCell]) -> tuple[list[dict], list[str]]:
        def keep(finished: list[dict]) -> None:
            file.write_text(json.dumps({"cells": finished}))

        return benchmark.run_all(cells, conditions, progress, benchmark.read_cells(file), keep)

    finished, failures = run(requested("480,960,720"))
    assert [cell["resolution"] for cell in finished] == [480, 720]
    assert failures == ["dgx-h100, 1 nodes, wan2.1-14b, 960 px: no memory"]
    calls.clear()
    finished, _ = run(requested("480,960,720"))
    assert calls == ["record 960 8x1"]
    calls.clear()
    finished, _ = run(requested("480", "fp8"))  # a variant is missing; the others stay
    assert [call.partition(" at")[0] for call in calls] == ["record 480 8x1", "measure 480"]
    assert len(finished) == 2
    assert finished[0]["modes"] == ["exact", "fp4", "fp8"]
    assert [row["mode"] for row in finished[0]["rows"]] == ["stock", "exact", "fp4", "fp8"]


def test_cells_with_fewer_repeats_than_asked_are_measured_again(calls: list[str]) -> None:
    finished: list[dict[str, Any]] = []
    measured = []
    for repeats, modes in ((2, "exact,fp4"), (3, "exact"), (2, "exact"), (3, "fp4")):
        calls.clear()
        conditions = Conditions(dilation=500, repeats=repeats)
        finished, _ = benchmark.run_all(requested("480", modes), conditions, ProgressReporter(None), finished)
        measured.append(calls[1:])
    twice, thrice = (f"measure 480 at 500, {repeats} times" for repeats in (2, 3))
    assert measured == [[twice], [thrice], [], []]
    assert len(finished) == 1
    assert {row["mode"]: len(row["step_seconds"]) for row in finished[0]["rows"]} == {"stock": 3, "exact": 3, "fp4": 3}


def test_a_cell_of_other_blocks_is_replaced_with_all_its_variants(calls: list[str]) -> None:
    """Else tables would average both as two cells."""
    conditions, progress = Conditions(dilation=500), ProgressReporter(None)
    [first], _ = benchmark.run_all(requested("480"), conditions, progress)
    earlier = [{**first, "blocks": first["blocks"] + 1}]
    finished, _ = benchmark.run_all(requested("480", "fp4"), conditions, progress, earlier)
    assert [cell["blocks"] for cell in finished] == [first["blocks"]]
    assert [row["mode"] for row in finished[0]["rows"]] == ["stock", "exact", "fp4"]
    calls.clear()
    benchmark.run_all(requested("480"), conditions, progress, finished)
    assert not calls


def test_more_repeats_do_not_predict_a_cell_again(calls: list[str]) -> None:
    finished: list[dict[str, Any]] = []
    for repeats in (2, 3):
        conditions = Conditions(repeats=repeats, predicts=True)
        finished, _ = benchmark.run_all(requested("480"), conditions, ProgressReporter(None), finished)
    assert calls == ["record 480 8x1"]


def test_finished_cells_get_the_psnr_of_a_later_record(calls: list[str]) -> None:
    cells, progress = requested("480"), ProgressReporter(None)
    finished, _ = benchmark.run_all(cells, Conditions(dilation=500), progress)
    fp4 = RULES["fp4"].quality_case
    assert fp4
    row = {"mode": fp4.mode, "sweep": True, "series": fp4.series, "codec": fp4.changes, "psnr_db_mean": 23.0}
    later = Conditions(dilation=500, quality=QualityRecord((row,)))
    finished, _ = benchmark.run_all(cells, later, progress, finished)
    assert {row["mode"]: row["psnr_db"] for row in finished[0]["rows"]} == {
        **dict.fromkeys(("stock", "exact")),
        "fp4": 23.0,
    }
    assert len(calls) == 2  # recorded and measured once


def test_a_record_without_a_variant_does_not_clear_its_psnr(calls: list[str]) -> None:
    """Neither where a cell is kept nor where it is measured again."""

    def row(name: str, psnr_db: float) -> dict[str, Any]:
        case = RULES[name].quality_case
        assert case
        return {"mode": case.mode, "sweep": True, "series": case.series, "codec": case.changes, "psnr_db_mean": psnr_db}

    finished: list[dict[str, Any]] = []
    seen = []
    both, one = QualityRecord((row("fp4", 23.0), row("fp8", 31.0))), QualityRecord((row("fp8", 32.0),))
    for repeats, quality in ((1, both), (1, one), (2, one), (3, QualityRecord())):
        conditions = Conditions(dilation=500, repeats=repeats, quality=quality)
        finished, _ = benchmark.run_all(requested("480", "fp4,fp8"), conditions, ProgressReporter(None), finished)
        seen.append([row["psnr_db"] for row in finished[0]["rows"]])
    assert seen == [[None, 23.0, 31.0], *[[None, 23.0, 32.0]] * 3]
    assert len(calls) == 2 * 3


def test_the_psnr_of_an_unknown_exchange_is_not_kept() -> None:
    """Records from before K and V were gathered have a PSNR by heads, whatever the mode did."""

    def row(name: str, psnr_db: float | None, **known: list[str]) -> dict[str, Any]:
        split = {"ulysses": 16, "ring": 1}
        return {"variant": name, "split": split, "lossless": psnr_db is None, "psnr_db": psnr_db, **known}

    rows = [row("exact", None), row("balanced", 53.6), row("paper", 45.7), row("fp4", 32.2)]
    rows += [row("fast", 53.0, coded_exchanges=["kv"])]
    cell = {"topology": "node=2,gpu=8", "slow_axes": ["node"], "rows": rows}
    benchmark.set_psnr(cell, QualityRecord())
    assert [each["psnr_db"] for each in rows] == [None, 53.6, 45.7, 32.2, 53.0]
    benchmark.set_psnr(cell, QualityRecord(({"mode": "paper", "sweep": False, "psnr_db_mean": 45.6},)))
    assert [each["psnr_db"] for each in rows] == [None, None, 45.6, 32.2, 53.0]
    assert [each.get("coded_exchanges") for each in rows] == [None, ["kv"], ["heads"], [], ["kv"]]


@pytest.fixture
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the command in this process, whose environment stays as it is."""
    monkeypatch.setattr(forked_ranks, "prepare_environment", lambda: None)
    monkeypatch.setattr(cli.bench.bench_cluster, "_silence_libraries", lambda: None)


@pytest.mark.usefixtures("_in_process")
def test_a_machine_without_namespaces_is_an_error_before_anything_starts(
    calls: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("this machine permits no user namespaces")

    monkeypatch.setattr(benchmark, "check_machine", fail)
    options = ["bench", "cluster", "--machine", "dgx-h100", "--nodes", "1", "--model", "wan", "--resolution", "480"]
    options += ["--layers", "1"]  # of the step made by hand
    assert cli.main(options) == 2
    assert capsys.readouterr().err == "cocodiff: this machine permits no user namespaces\n"
    assert calls == []
    assert cli.main([*options, "--predict"]) == 0
    assert "predicted, not measured" in capsys.readouterr().out


@pytest.mark.usefixtures("_in_process")
def test_a_file_of_another_command_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    file.write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"--json .*other.json is not valid .*a record of `cocodiff bench cluster`"):
        benchmark.read_cells(file)
    options = ["bench", "cluster", "--machine", "pcie", "--model", "wan", "--resolution", "480"]
    assert cli.main([*options, "--json", str(file)]) == 2
    assert cli.main([*options, "--quality", str(tmp_path / "none.json")]) == 2
    assert "`cocodiff quality --sweep --json`" in capsys.readouterr().err
    assert cli.main([*options, "--repeats", "0"]) == 2


def test_the_report_shows_every_variant_and_why_times_are_invalid(
    calls: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from xfuser_cocodiff.lab.cluster_bench import report

    cell = benchmark.run(requested("480")[0], Conditions(dilation=500))
    cell["rows"][1] |= {"valid": False, "invalid_because": ["prediction is off by +20.0%"]}
    impossible = {**cell, "problem": "xDiT fails", "rows": []}
    report.show({"cells": [cell, impossible]})
    printed = capsys.readouterr().out
    for text in ("stock", "exact", "fp4", "8 x 1", "lossless", "D = 500", "not measured: xDiT fails"):
        assert text in printed
    assert "INVALID: exact: prediction is off by +20.0%" in printed


COMMAND = [sys.executable, "-m", "xfuser_cocodiff.cli", "bench", "cluster", "--machine", "dgx-h100", "--nodes", "1"]


@pytest.mark.slow
def test_the_command_predicts_a_small_cell(tmp_path: Path) -> None:
    file, plot = tmp_path / "record.json", tmp_path / "plot.png"
    options = ["--model", "flux1", "--resolution", "256", "--modes", "best_stock,exact,fp4", "--predict"]
    done = subprocess.run(
        [*COMMAND, *options, "--json", str(file), "--plot", str(plot)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    [cell] = json.loads(file.read_text())["cells"]
    rows = {row["mode"]: row for row in cell["rows"]}
    assert rows.keys() >= {"stock", "best_stock", "exact", "fp4"}
    # Q, K, V and O of 57 layers: 512 text and 256 image tokens of 3072 values in bf16, 7/8 of an eighth of them.
    sent = 57 * 4 * (512 + 256) * 3072 * 2 * 7 / 8 / 8
    assert rows["stock"]["bytes_per_link"]["gpu"] == pytest.approx(sent, rel=0.01)
    assert rows["fp4"]["bytes_per_link"]["gpu"] == pytest.approx(sent * (4 + 0.5) / 16, rel=0.02)
    assert all(row["predicted_seconds"] > row["compute_seconds"] > 0 for row in rows.values())
    assert "fp4" in done.stdout and plot.exists()


FOUR_RANKS = """
from xfuser_cocodiff.lab.emulation import forked_ranks
forked_ranks.prepare_environment()
import dataclasses, json, sys
from xfuser_cocodiff.lab.cluster_bench import benchmark, requested_cells
from xfuser_cocodiff.lab.cluster_bench.cell import Cell
from xfuser_cocodiff.lab.simulation.machines import ETHERNET_25
machine = dataclasses.replace(ETHERNET_25, node_axes=(("gpu", 2),))
[requested] = requested_cells.request([Cell(machine, 2, "flux.1-dev", 512)], "exact", predicts=False)
cell = benchmark.run(requested, benchmark.Conditions(repeats=1))
print(json.dumps(cell))
"""


@pytest.mark.slow
@needs_namespaces
def test_four_ranks_need_the_time_that_their_links_need() -> None:
    done = subprocess.run([sys.executable, "-c", FOUR_RANKS], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    cell = json.loads(done.stdout.splitlines()[-1])
    stock = cell["rows"][0]
    assert (stock["mode"], stock["split"]) == ("stock", {"ulysses": 4, "ring": 1})
    # A busy machine makes steps longer, at both dilations, but never shorter than their links permit.
    assert 0.3 < stock["prediction_ratio"] < 1.1
    assert 0.4 < stock["dilation_ratio"] < 1.6
    assert stock["bytes_ratio"] == {axis: pytest.approx(1, abs=0.1) for axis in ("node", "gpu")}
    assert stock["step_seconds"][0] > stock["bytes_per_link"]["node"] / (1448 / 1538 * 3.125e9 / 8)
