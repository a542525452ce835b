"""The command, on steps made by hand: cells, variants, rows and speedups, exposure, and tables of a folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accelerator.program import Program
from benchmarks.cluster import __main__ as command
from benchmarks.cluster import rows, tables, variants
from benchmarks.cluster.cell import Cell
from benchmarks.cluster.recording import KEYFRAME, Recording
from benchmarks.cluster.rows import RecordedVariant
from benchmarks.cluster.variants import Variant
from tests.benchmarks.cluster.programs import blocks
from xfuser_cocodiff.tools.simulation.machines import MACHINES
from xfuser_cocodiff.xdit.session.schedule_tuner import MIN_SAVING
from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit

MS = 1e-3
CELL = ["--machine", "dgx-h100", "--nodes", "1", "--model", "wan", "--resolution", "480"]


def cell(
    machine: str = "aurora", nodes: int = 2, model: str = "flux.1-dev", resolution: int = 768, **more: int
) -> Cell:
    return Cell(MACHINES[machine], nodes, model, resolution, **more)


def step(variant: Variant) -> Program:
    """Return a step of one block: stock computes for 4 ms, in fewer ranks of Ulysses for longer, modes for 2 ms."""
    return blocks(8, 10**5, (4 if variant.rule else 2) * MS, 8 * MS / variant.split.ulysses)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let steps be made by hand; return the names of recorded variants."""
    names: list[str] = []

    def record(used: Cell, split: UlyssesRingSplit, chosen: list[Variant]) -> dict[str, Recording]:
        names.extend(each.name for each in chosen)
        return {each.name: Recording({"step": step(each)}, {"step": 1.0}) for each in chosen}

    monkeypatch.setattr(rows, "record_split", record)
    monkeypatch.setattr(command, "_silence_libraries", lambda: None)
    monkeypatch.setattr(command, "RECORDED_BLOCKS", 1)
    return names


def test_a_record_has_speedups_over_stock_and_its_fastest_split(recorded: list[str], tmp_path: Path) -> None:
    arguments = [*CELL, "--modes", "best_stock", "exact", "--json", str(tmp_path / "cluster-1.json")]
    assert command.main(arguments) == 0
    [found] = json.loads((tmp_path / "cluster-1.json").read_text())["cells"]
    by_mode = {row["mode"]: row for row in found["rows"]}
    stock, exact, best = (by_mode[name] for name in ("stock", "exact", "best_stock"))
    # Two calls of 40 blocks of 8 x 1: computation, and 7 messages of 100 kB at 370 GB/s after 18 us and 7 x 0.5 us.
    message = 18e-6 + 7 * 0.5e-6 + 7e5 / 370e9
    assert stock["step_seconds"] == [pytest.approx(80 * (5 * MS + message))]
    assert (stock["compute_seconds"], stock["exposed_seconds"]) == (pytest.approx(0.4), pytest.approx(80 * message))
    assert stock["bytes_per_link"] == {"gpu": 80 * 7e5}
    assert best["variant"] == "stock" and best["split"] == {"ulysses": 8, "ring": 1}
    speedup = (5 * MS + message) / (3 * MS + message)
    assert exact["speedup"] == exact["speedup_over_best_stock"] == pytest.approx(speedup)
    assert {name.split()[-1] for name in recorded if name.startswith("stock ")} == {"1x8", "2x4", "4x2"}


def test_an_error_names_option_value_and_valid_set(recorded: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*CELL, "--resolution", "1000"]) == 2
    message = "--resolution 1000 is not valid; valid are multiples of 16"
    assert message in capsys.readouterr().err and not recorded


def test_a_size_that_xdit_cannot_run_says_why() -> None:
    found = rows.predict_cell(cell(resolution=800), ["exact"])
    assert "not divisible by 24: xDiT fails" in found["problem"] and not found["rows"]


def test_text_that_xdit_cannot_shard_is_shortened() -> None:
    """A user would set --max_sequence_length as xDiT's error says."""
    assert cell(model="flux.2-dev").workload.text_tokens == 504


def test_lossy_modes_are_left_out_where_no_axis_is_slow() -> None:
    fast, slow = (variants.expand(cell(machine), ["default"]) for machine in ("dgx-h100", "aurora"))
    assert fast == ["best_stock", "exact", "best_exact"]
    assert slow == [*fast, "balanced", "best_balanced", "fast", "best_fast"]


def test_best_stock_has_each_split_with_one_message_and_three() -> None:
    """FLUX.1 sends Q, K and V in one message, Qwen-Image in three; a ring alone has no such messages."""
    for model, other in (("flux.1-dev", "stock-separate"), ("qwen-image", "stock-combined")):
        names = [each.name for each in variants.parse(cell("dgx-h100", 1, model), ["best_stock"])]
        splits = ("1x8", "2x4", "4x2")
        assert sorted(names) == sorted(
            ["stock", *(f"stock {split}" for split in splits), *(f"{other} {split}" for split in ("2x4", "4x2", "8x1"))]
        )


def test_best_modes_have_all_other_splits() -> None:
    sd35 = cell(model="sd3.5-large", resolution=1536)  # 38 heads on 24 ranks
    usual, *others = variants.parse(sd35, ["exact", "best_exact"])
    assert 38 % usual.split.ulysses == 0 and any(38 % each.split.ulysses for each in others)  # zero-padded
    assert all(each.options == usual.options and each.split != usual.split for each in others)


def test_another_schedule_must_save_enough_and_keyframes_count_by_their_weight() -> None:
    used = cell("dgx-h100", 1, "wan2.1-14b", 480)
    for saving, chosen in ((0.9 * MIN_SAVING, "step"), (1.1 * MIN_SAVING, "other")):
        programs = {
            name: blocks(8, 0, 0, each / 80) for name, each in (("step", 1), ("other", 1 - saving), (KEYFRAME, 2))
        }
        recording = Recording(programs, {"step": 0.75, KEYFRAME: 0.25}, {"step": ["other"]})
        variant = Variant("balanced", UlyssesRingSplit(8, 1))
        found = RecordedVariant(used, variant, recording)
        assert found.chosen == {"step": chosen, KEYFRAME: KEYFRAME}
        taken = 1 - saving if chosen == "other" else 1.0
        assert found.step_seconds == pytest.approx(0.75 * taken + 0.25 * 2, rel=1e-2)
        assert not found.row()["lossless"]


def table_cell(seconds: dict[str, float], **changed: Any) -> dict[str, Any]:
    """Return a cell of two nodes of Aurora; half a second of each step is computation."""
    found = [
        {
            **{"mode": mode, "step_seconds": [each], "compute_seconds": 0.5, "exposed_seconds": each - 0.5},
            "split": {"ulysses": 12, "ring": 2},
        }
        for mode, each in seconds.items()
    ]
    known = {"machine": "aurora", "nodes": 2, "ranks": 24, "model": "flux.1-dev", "resolution": 768, "batch": 1}
    return {**known, "rows": found, **changed}


def printed_tables(folder: Path, capsys: pytest.CaptureFixture[str], *cells: dict[str, Any]) -> list[str]:
    """Return the lines of the tables of some cells."""
    (folder / "cluster-1.json").write_text(json.dumps({"cells": cells}))
    assert tables.main([str(folder)]) == 0
    return capsys.readouterr().out.splitlines()


def test_table_of_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = {"best_stock": 2.0, "best_exact": 1.6, "best_balanced": 0.8}
    lines = printed_tables(tmp_path, capsys, table_cell(times))
    assert lines[0] == "| model | machine, ranks | best stock | waits | `exact` | `balanced` | `fast` |"
    row = "| flux.1-dev, 768 px | `aurora`, 24 | 2.00 s, 12x2 | 75 % | 1.25x, 12x2 | 2.50x, 12x2 | - |"
    assert [line for line in lines if "flux" in line] == [row]


def test_table_of_the_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its columns beside the bound have speedups of 1, 2, 4, ... over the baseline."""
    modes = {mode: 2.0 / 2**index for index, mode in enumerate(tables.PARTS.values())}
    twice = {mode: 2 * each for mode, each in modes.items()}
    flat = [table_cell({"stock": 2.0, **modes}), table_cell({"stock": 8.0, **modes}, resolution=1536)]
    ring = table_cell({"best_stock": 2.0, **twice}, model="sd3.5-large")
    lines = printed_tables(tmp_path, capsys, *flat, ring)
    columns = " | ".join(f"{2**power:.2f}/{4 * 2**power:.2f}" for power in range(6))
    assert lines[-3:] == [
        f"| flux.1-dev, 24, 768/1536 px | 4.00/16.00 | {columns} |",
        "| sd3.5-large, 24, 768 px, over best stock | 4.00 | 0.50 | 1.00 | 2.00 | 4.00 | 8.00 | 16.00 |",
        "| mean, 24, batch 1 | 8.00 | 2.00 | 4.00 | 8.00 | 16.00 | 32.00 | 64.00 |",
    ]
