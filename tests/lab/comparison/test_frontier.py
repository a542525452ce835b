"""Tables and pictures of methods by bytes and PSNR."""

import json
from pathlib import Path
from typing import Any

import pytest

from xfuser_cocodiff import cli
from xfuser_cocodiff.lab.comparison import frontier, quality


def row(case: quality.CodecCase, bytes_fraction: float, psnr: float | None) -> dict[str, Any]:
    """Return a row of a record; without a PSNR, the images are equal."""
    return {
        "mode": case.mode,
        "sweep": case.sweep,
        "series": case.series,
        "codec": case.changes,
        "exchanges": ["heads" if case.sweep else "kv"],
        "bytes_slow_fraction": bytes_fraction,
        "psnr_db_mean": psnr,
        "psnr_db_sd": psnr and 2.0,
        "bit_equal": psnr is None,
    }


def write_record(folder: Path, model: str, steps: int, scale: float | None, psnr: float | None) -> None:
    """Write a record in which every method has one PSNR, and bytes that follow from the steps."""
    cases = quality.parse_cases(["balanced"], [*quality.SWEEPS[quality.METHODS], "fewer tokens"])
    rows = [row(case, 1 / steps, psnr) for case in cases]
    record = {"model": model, "steps": steps, "guidance_scale": scale, "seeds": 8, "rows": rows}
    (folder / f"frontier-{model}-{steps}-{scale}.json").write_text(json.dumps(record))


def test_the_table_has_a_row_per_method_and_a_column_per_number_of_steps(tmp_path: Path) -> None:
    for steps, psnr in ((4, 31.04), (20, 42.0)):
        write_record(tmp_path, "Wan", steps, None, psnr)
    write_record(tmp_path, "Wan", 8, 1.0, None)
    lines = frontier.table(frontier.read_folder(tmp_path))
    assert lines[:4] == ["**Wan**, 8 seeds:", "", "| method | bytes | 20 steps | 4 steps |", "|---|---|---|---|"]
    assert lines[4] == "| `balanced`, gathered K and V | 0.05-0.25 | 42.0±2.0 | 31.0±2.0 |"
    assert "| CompactFusion, bits=2 | 0.05-0.25 | 42.0±2.0 | 31.0±2.0 |" in lines
    other = lines[lines.index("**Wan, guidance scale 1**, 8 seeds:") :]
    assert other[4] == "| `balanced`, gathered K and V | 0.12 | equal |"
    methods = [line.split(" | ")[0] for line in other[4:]]
    assert len(methods) == len({*methods}) == 10, "a sweep of tokens is no method"


def test_the_command_fills_a_page_and_draws_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, picture = tmp_path / "page.md", tmp_path / "frontier.png"
    command = ["bench", "frontier", str(tmp_path), "--page", str(page), "--plot", str(picture)]
    assert cli.main(command) == 2
    assert "has no frontier-*.json" in capsys.readouterr().err
    write_record(tmp_path, "Wan", 8, None, 40.0)
    write_record(tmp_path, "FLUX", 8, None, 50.0)
    page.write_text("Before\n<!-- frontier-table -->\n<!-- /frontier-table -->\nAfter\n")
    assert cli.main(command) == 0
    text = page.read_text()
    assert text.startswith("Before\n<!-- frontier-table -->\n\n**FLUX**, 8 seeds:\n\n| method |")
    assert text.endswith("|\n\n<!-- /frontier-table -->\nAfter\n")
    assert "**Wan**" in capsys.readouterr().out
    assert picture.stat().st_size > 1000
