"""What the report of `cocodiff bench cluster` says of the rows of a record."""

from typing import Any

import pytest

from xfuser_cocodiff.lab.cluster_bench import report


def row(mode: str, step_seconds: float | None = 2.0, **changed: Any) -> dict[str, Any]:
    """Return a valid row with speedups of 1.25x over stock and 1.11x over best stock."""
    return {
        "mode": mode,
        "variant": mode,
        "split": {"ulysses": 8, "ring": 1},
        **{"dilation": 500.0, "thinning": 1},
        "step_seconds": [step_seconds] if step_seconds else None,
        "predicted_seconds": 2.0,
        "simulated_seconds": None,
        "prediction_ratio": 1.0 if step_seconds else None,
        "exposed_seconds": 0.5,
        "bytes_per_link": {"gpu": 1e6},
        "lossless": True,
        "psnr_db": None,
        "valid": True if step_seconds else None,
        "invalid_because": [],
        "speedup": 1.25,
        "speedup_over_best_stock": 1.11,
        **changed,
    }


def cell(*rows: dict[str, Any]) -> dict[str, Any]:
    """Return a cell with rows."""
    return {
        **{"machine": "dgx-h100", "topology": "gpu=8", "model": "wan", "resolution": 480, "batch": 1},
        **{"text_tokens": 0, "launch_us": 8.0, "predicted": False},
        **{"problem": None, "rows": list(rows)},
    }


def printed(capsys: pytest.CaptureFixture[str], *cells: dict[str, Any]) -> str:
    """Return the report of cells."""
    report.show({"cells": list(cells)})
    return capsys.readouterr().out


INVALID = {"valid": False, "invalid_because": ["prediction is off by +20.0%", "a core was idle 3% of the time"]}


def test_speedups_are_printed_over_valid_rows_only(capsys: pytest.CaptureFixture[str]) -> None:
    reasons = "(prediction is off by +20.0%; a core was idle 3% of the time)"
    rows = {"stock": row("stock"), "best_stock": row("best_stock"), "exact": row("exact")}
    text = printed(capsys, cell(*rows.values()))
    assert text.count("1.25x") == text.count("1.11x") == 3 and "no speedup" not in text
    text = printed(capsys, cell(*{**rows, "stock": row("stock", **INVALID)}.values()))
    assert "1.25x" not in text and text.count("1.11x") == 3
    assert f"no speedup over stock, which is INVALID {reasons}\n" in text
    text = printed(capsys, cell(*{**rows, "best_stock": row("best_stock", **INVALID)}.values()))
    assert "1.11x" not in text and text.count("1.25x") == 3
    assert f"no speedup over best stock, which is INVALID {reasons}\n" in text


def test_an_invalid_row_invalidates_no_speedup_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, cell(row("stock"), row("exact"), row("fp4", **INVALID)), cell(row("stock"), row("exact")))
    assert "no speedup" not in text and text.count("1.25x") == 5


def test_speedups_over_predicted_rows_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, cell(row("stock", None), row("exact", None))).count("1.25x") == 2


def test_the_simulator_is_compared_with_measured_stock_and_exact(capsys: pytest.CaptureFixture[str]) -> None:
    """Not where one of the two times is missing or invalid, nor in other rows."""
    rows = [
        row("stock", 2.0, simulated_seconds=1.8),
        row("exact", 2.0, simulated_seconds=2.1),
        row("best_stock", 2.0, simulated_seconds=9.0),
        row("balanced", 2.0, simulated_seconds=9.0),
    ]
    unknown = [
        row("stock", None, simulated_seconds=9.0),
        row("exact", 2.0),
        row("exact", 2.0, simulated_seconds=9.0, **INVALID),
    ]
    median = row("exact", simulated_seconds=2.0) | {"step_seconds": [1.0, 1.6, 9.0]}
    impossible = {**cell(), "problem": "xDiT fails"}
    text = printed(capsys, cell(*rows), cell(*unknown), cell(median), impossible)
    assert "simulator: 0.90 to 1.25 of the measured step time, in 3 valid rows of stock and exact\n" in text
    assert "simulator" not in printed(capsys, cell(*unknown))
