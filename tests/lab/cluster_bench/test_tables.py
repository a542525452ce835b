"""Tables of pages from records: the paper's table on Aurora, and speedups by machine and mode."""

import json
from pathlib import Path
from typing import Any

import pytest

from xfuser_cocodiff import cli
from xfuser_cocodiff.lab.cluster_bench import page_tables, record_files
from xfuser_cocodiff.lab.cluster_bench.paper_table import paper_table
from xfuser_cocodiff.lab.cluster_bench.quality_record import QualityRecord
from xfuser_cocodiff.lab.cluster_bench.row_names import TAPA, TAPA_AND_V_MAJOR
from xfuser_cocodiff.lab.cluster_bench.speedup_table import speedup_table


def row(mode: str, seconds: float, valid: bool | None = True, **changed: Any) -> dict[str, Any]:
    """Return a row; predicted if it is neither valid nor invalid. Half a second of it is computation."""
    return {
        **{"mode": mode, "variant": mode, "split": {"ulysses": 24, "ring": 1}, "valid": valid},
        **{"step_seconds": None if valid is None else [9 * seconds, seconds, seconds / 9]},
        **{"predicted_seconds": seconds if valid is None else 99.0, "compute_seconds": 0.5},
        **{"lossless": True, "psnr_db": None, **changed},
    }


def cell(*rows: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """Return a cell of two nodes of Aurora."""
    return {
        **{"machine": "aurora", "nodes": 2, "ranks": 24, "model": "flux.1-dev", "resolution": 1536, "batch": 1},
        **{"topology": "node=2,gpu=6,tile=2", "slow_axes": ["node", "gpu"], "predicted": False, "problem": None},
        **{"text_tokens": 512, "blocks": 1, "launch_us": 10.0, "requested_dilation": None, "modes": []},
        **{"rows": list(rows), **changed},
    }


PREDICTED = cell(
    *(row("stock", 2.2, None), row(TAPA, 1.1, None), row("exact", 1.0, None), row(TAPA_AND_V_MAJOR, 0.8, None)),
    predicted=True,
)
MEASURED = cell(row("stock", 2.0), row(TAPA, 1.25), row("exact", 0.5, valid=False), row("paper", 0.8))
"""With stock at 2 s, of which half a second is computation, so that no schedule exceeds 4x."""


def entries(lines: list[str], name: str) -> list[str]:
    """Return the entries of the table's row that begins with a name."""
    return next(list(map(str.strip, line.strip("|").split("|"))) for line in lines if line.startswith(f"| {name} |"))


def test_measured_speedups_go_before_predicted_ones() -> None:
    lines = paper_table([PREDICTED, MEASURED])
    assert entries(lines, "FLUX.1, 24") == [
        *("FLUX.1, 24", "-/4.00/-", "-/1.60/-", "-", "-/*2.75*/-", "-/2.50/-", "-/*2.20*/-", "-")
    ]
    assert entries(lines, "mean, 24") == ["mean, 24", "4.00", "1.60", "-", "*2.75*", "2.50", "*2.20*", "-"]
    assert entries(lines, "FLUX.2, 24")[1:] == ["-"] * 7


def test_speedups_over_an_invalid_baseline_are_predicted_ones() -> None:
    invalid = cell(row("stock", 9.0, valid=False), row(TAPA, 1.25))
    assert entries(paper_table([invalid, PREDICTED]), "FLUX.1, 24")[1:3] == ["-/*4.40*/-", "-/*2.00*/-"]
    assert entries(paper_table([invalid]), "FLUX.1, 24")[1:3] == ["-", "-"]


def test_models_without_flat_ulysses_are_compared_with_best_stock_and_in_no_mean() -> None:
    without = cell(row("best_stock", 1.0), row("exact", 0.8), model="sd3.5-large", nodes=1, ranks=12)
    peak = cell(row("best_stock", 1.0, None), row("balanced", 0.4, None), model="sd3.5-large", nodes=4)
    lines = paper_table([without, {**peak, "resolution": 2304, "predicted": True}, {**MEASURED, "batch": 8}])
    assert entries(lines, "SD3.5, 12 (best stock)")[1] == "-/2.00/-"
    assert entries(lines, "SD3.5, 12 (best stock)")[6] == "-/1.25/-"
    assert entries(lines, "mean, 12")[1:] == entries(lines, "mean, 24")[1:] == ["-"] * 7
    assert entries(lines, "mean, 1536 px, batch 8, 24")[1:4] == ["4.00", "1.60", "-"]
    assert entries(lines, "SD3.5, 2304 px, 48 (best stock)")[-1] == "*2.50*"
    means = entries(lines, "the paper: mean/12/24 to 96 ranks")[2:6]
    assert [each.split("/")[0] for each in means] == ["2.3", "1.3", "2.9", "3.6"]
    assert entries(lines, "the paper: SD3.5, 2304 px, 48")[5] == "8.4"


def test_speedups_by_machine_are_means_over_best_stock() -> None:
    cells = [
        cell(row("best_stock", 1.0), row("exact", 0.5), row("fast", 0.5, valid=False)),
        cell(row("best_stock", 1.0), row("exact", 0.125), row("fast", 0.25), model="sd3.5-large"),
        cell(row("best_stock", 1.0, None), row("exact", 0.01, None), predicted=True),
        cell(row("best_stock", 1.0), row("balanced@slow_axes=gpu", 0.5), machine="pcie", nodes=1, ranks=8),
        cell(row("best_stock", 1.0, None), row("best_exact", 0.5, None), machine="arc-b60", ranks=8, predicted=True),
    ]
    lines = speedup_table(cells)
    assert entries(lines, "`aurora`, 24")[1:] == ["2", "4.00", "-", "-", "-", "4.00(1)", "-", "-"]
    assert entries(lines, "`pcie`, 8")[2:] == ["-", "-", "2.00", "-", "-", "-", "-"]
    assert entries(lines, "`arc-b60`, 8")[1:4] == ["1", "-", "*2.00*"]


def test_tables_of_predictions_alone_have_no_italics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster-one.json").write_text(json.dumps({"cells": [PREDICTED]}))
    (tmp_path / "cluster-two.json").write_text(json.dumps({"cells": [MEASURED]}))
    assert cli.main(["bench", "tables", str(tmp_path)]) == 0
    assert "*2.20*" in capsys.readouterr().out
    (tmp_path / "cluster-two.json").unlink()
    assert cli.main(["bench", "tables", str(tmp_path)]) == 0
    assert "2.20" in (printed := capsys.readouterr().out) and "*" not in printed


def test_tables_go_to_their_places_in_a_page() -> None:
    page = "before\n<!-- one -->\nold\n<!-- /one -->\nbetween\n<!-- two -->\n<!-- /two -->\nafter\n"
    expected = "before\n<!-- one -->\n| \\1 |\n<!-- /one -->\nbetween\n<!-- two -->\n2\n3\n<!-- /two -->\nafter\n"
    assert page_tables.replace_parts(page, {"one": ["| \\1 |"], "two": ["2", "3"]}) == expected
    with pytest.raises(ValueError, match="no place for a table between <!-- three --> and <!-- /three -->"):
        page_tables.replace_parts(page, {"three": []})


def test_the_newest_record_of_a_cell_counts_and_predictions_are_joined(tmp_path: Path) -> None:
    records = {
        "cluster-b": ("2026-01-01", [cell(row("stock", 3.0)), PREDICTED]),
        "cluster-a": ("2026-01-02", [MEASURED, cell(row("exact", 0.9, None), row("fast", 0.5, None), predicted=True)]),
        "other": ("2026-01-03", [cell(row("stock", 9.0))]),
    }
    for name, (created, cells) in records.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"created": created, "cells": cells}))
    measured, predicted = record_files.read_folder(tmp_path, QualityRecord())
    assert [each["mode"] for each in measured["rows"]] == [each["mode"] for each in MEASURED["rows"]]
    seconds = {each["mode"]: each["predicted_seconds"] for each in predicted["rows"]}
    assert seconds == {"exact": 0.9, "fast": 0.5, "stock": 2.2, TAPA: 1.1, TAPA_AND_V_MAJOR: 0.8}
    over_flat = {each["mode"]: each["speedup"] for each in predicted["rows"]}
    assert over_flat == {mode: pytest.approx(2.2 / each) for mode, each in seconds.items()}
    assert {each["speedup_over_best_stock"] for each in predicted["rows"]} == {None}
    with pytest.raises(ValueError, match=r"has no cluster-\*.json"):
        record_files.read_folder(tmp_path / "none", QualityRecord())


@pytest.mark.parametrize("changed", [{"launch_us": 0.0}, {"text_tokens": 77}])
def test_other_launch_times_and_texts_are_other_cells(tmp_path: Path, changed: dict[str, Any]) -> None:
    cells = [PREDICTED, cell(row("stock", 1.0, None), predicted=True, **changed)]
    for index, each in enumerate(cells):
        (tmp_path / f"cluster-{index}.json").write_text(json.dumps({"created": f"{index}", "cells": [each]}))
    found = record_files.read_folder(tmp_path, QualityRecord())
    assert [(each["launch_us"], each["text_tokens"]) for each in found] == [
        (each["launch_us"], each["text_tokens"]) for each in cells
    ]
    assert [len(each["rows"]) for each in found] == [4, 1]


def test_the_command_fills_a_page_and_draws_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best, lossy = row("best_stock", 1.0), row("balanced", 0.5, lossless=False)
    for each in (best, lossy):
        each["speedup_over_best_stock"] = 1.0 / each["step_seconds"][1]
    graphs = cell(row("best_stock", 1.0), row("balanced", 0.1), launch_us=0.0)
    (tmp_path / "cluster-one.json").write_text(json.dumps({"cells": [cell(best, lossy), graphs]}))
    quality = {"mode": "balanced", "sweep": False, "exchanges": ["heads"], "psnr_db_mean": 53.0}
    (tmp_path / "frontier.json").write_text(json.dumps({"rows": [quality]}))
    page, picture = tmp_path / "page.md", tmp_path / "pictures/frontier-aurora.png"
    picture.parent.mkdir()
    names = ("paper-table", "speedup-table", "frontier-pictures")
    page.write_text("".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in names))
    assert cli.main(["bench", "tables", str(tmp_path), "--page", str(page), "--plot", str(picture)]) == 0
    assert "| `aurora`, 24 | 1 | - | - | 2.00 |" in page.read_text()
    assert "FLUX.1, 24 (best stock)" in capsys.readouterr().out
    assert picture.stat().st_size > 1000
    assert "\n![aurora](pictures/frontier-aurora.png)\n" in page.read_text()
    page.write_text("")
    assert cli.main(["bench", "tables", str(tmp_path), "--page", str(page)]) == 2
    assert "no place for a table" in capsys.readouterr().err
