"""Rows of the record, from steps made by hand whose times are known."""

from dataclasses import replace
from typing import Any

import pytest

from tests.lab.cluster_bench.programs import one_block
from xfuser_cocodiff.engine.topology.link_profile import AxisLink
from xfuser_cocodiff.lab.cluster_bench import cell_rows
from xfuser_cocodiff.lab.cluster_bench.cell import Cell
from xfuser_cocodiff.lab.cluster_bench.cell_rows import RecordedVariant
from xfuser_cocodiff.lab.cluster_bench.measurement import MeasuredProgram, MeasuredSplit, MeasuredVariant
from xfuser_cocodiff.lab.cluster_bench.quality_record import QualityRecord
from xfuser_cocodiff.lab.cluster_bench.recording import KEYFRAME, Recording
from xfuser_cocodiff.lab.cluster_bench.rules import RULES
from xfuser_cocodiff.lab.cluster_bench.variants import Variant
from xfuser_cocodiff.lab.simulation.machines import DGX_H100
from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit

RATE, MESSAGE = 1e9, 1_000_000
MACHINE = replace(DGX_H100, links=(AxisLink("node", 0.0, RATE), AxisLink("gpu", 0.0, RATE)), launch_seconds=0.0)
CELL = Cell(MACHINE, 1, "wan2.1-14b", 480)  # two calls of 40 equal blocks
BLOCKS, CALLS, RANKS = 40, 2, 8
BEFORE, AFTER, TRANSFER = 0.004, 0.002, (RANKS - 1) * MESSAGE / RATE
STEP = CALLS * BLOCKS * (BEFORE + TRANSFER + AFTER)
SPLIT = UlyssesRingSplit(RANKS, 1)
KEYS = {
    *("mode", "exchange", "step_seconds", "speedup", "speedup_over_best_stock", "exposed_seconds", "bytes_per_link"),
    *("psnr_db", "valid", "invalid_because"),
}
"""Keys that other programs read."""


def recorded(name: str, message_bytes: int = MESSAGE, **parts: Any) -> RecordedVariant:
    """Return a variant with one program, "step"."""
    recording = Recording({"step": one_block(RANKS, message_bytes, BEFORE, AFTER)}, {"step": 1.0})
    variant = Variant(name, SPLIT, RULES[name]) if name in RULES else Variant(name, SPLIT, mode=name)
    return RecordedVariant(CELL, variant, replace(recording, **parts), {"block": BLOCKS})


def measured(seconds: list[float], slower: float, late: float = 0.0) -> MeasuredVariant:
    """Return measured times of the program "step"."""
    return MeasuredVariant({"step": MeasuredProgram(seconds, slower, late)}, {"step": 1.0}, {})


def test_a_predicted_row_has_times_bytes_and_exposed_communication() -> None:
    row = cell_rows.predicted_row(recorded("stock"), QualityRecord())
    assert row["predicted_seconds"] == pytest.approx(STEP)
    assert row["compute_seconds"] == pytest.approx(CALLS * BLOCKS * (BEFORE + AFTER))
    assert row["exposed_seconds"] == pytest.approx(CALLS * BLOCKS * TRANSFER)
    assert row["bytes_per_link"] == {"gpu": CALLS * BLOCKS * (RANKS - 1) * MESSAGE}
    assert row["exchange"] == {"gpu": CALLS * BLOCKS}
    assert row["launches"] == CALLS * BLOCKS * 2
    assert row["step_seconds"] is None and row["valid"] is None


def test_a_measured_row_has_all_keys_and_is_valid() -> None:
    split = MeasuredSplit({}, 0.6, {"gpu": 101.0}, {"gpu": 100.0})
    times = [1.01 * STEP, STEP, 1.03 * STEP]
    row = cell_rows.measured_row(recorded("stock"), measured(times, 1.02 * STEP), split, QualityRecord())
    assert row["step_seconds"] == times
    assert row["exposed_seconds"] == pytest.approx(1.01 * STEP - CALLS * BLOCKS * (BEFORE + AFTER))
    assert row["dilation_ratio"] == pytest.approx(1.02 / 1.01)
    assert row["prediction_ratio"] == pytest.approx(1 / 1.01)
    assert row["bytes_ratio"] == {"gpu": 1.01}
    assert (row["valid"], row["invalid_because"]) == (True, [])
    [compared] = cell_rows.compare([row], {"best_stock": ["stock"]})[:1]
    assert compared.keys() >= KEYS


def test_a_late_collective_is_compared_with_the_recorded_step() -> None:
    """What is late in a recorded block is late in all blocks that it stands for."""
    split, recorded_step = MeasuredSplit({}, 0.6, {}, {}), BEFORE + TRANSFER + AFTER
    late = measured([STEP], STEP, late=0.02 * recorded_step)
    row = cell_rows.measured_row(recorded("stock"), late, split, QualityRecord())
    assert row["invalid_because"] == ["a collective started late by 2.0% of the step"]


def test_speedups_are_over_flat_stock_and_over_the_fastest_stock() -> None:
    fast, slow = (MESSAGE // 4, MESSAGE * 2)
    rows = [
        cell_rows.predicted_row(recorded("stock", slow), QualityRecord()),
        cell_rows.predicted_row(recorded("stock-combined", MESSAGE), QualityRecord()),
        cell_rows.predicted_row(recorded("exact", fast), QualityRecord()),
    ]
    compared = {row["mode"]: row for row in cell_rows.compare(rows, {"best_stock": ["stock", "stock-combined"]})}
    times = {mode: row["predicted_seconds"] for mode, row in compared.items()}
    assert list(compared) == ["stock", "stock-combined", "best_stock", "exact"]
    assert compared["best_stock"]["variant"] == "stock-combined"
    assert compared["exact"]["speedup"] == pytest.approx(times["stock"] / times["exact"])
    assert compared["exact"]["speedup_over_best_stock"] == pytest.approx(times["stock-combined"] / times["exact"])
    assert compared["best_stock"]["speedup_over_best_stock"] == 1
    without_flat = {row["mode"]: row for row in cell_rows.compare(rows[1:], {"best_stock": ["stock-combined"]})}
    assert without_flat["exact"]["speedup"] is None


def test_a_mode_and_best_stock_are_the_fastest_measured_split() -> None:
    def row(mode: str, seconds: float, is_measured: bool = True) -> dict[str, Any]:
        times = {"step_seconds": [seconds] * 3 if is_measured else None, "predicted_seconds": seconds}
        return {"mode": mode, "variant": mode, **times, "valid": is_measured or None}

    rows = [
        *(row("stock", 9.0), row("stock-combined 4x2", 4.0), row("stock-combined 2x4", 3.9, is_measured=False)),
        *(row("exact", 4.0), row("exact 4x2", 2.0)),
    ]
    in_splits = {"best_exact": ["exact", "exact 4x2"], "best_stock": [each["mode"] for each in rows[:3]]}
    compared = {row["mode"]: row for row in cell_rows.compare(rows, in_splits)}
    assert compared["best_stock"]["variant"] == "stock-combined 4x2"
    assert compared["best_exact"]["variant"] == "exact 4x2"
    assert compared["best_exact"]["speedup_over_best_stock"] == 2


@pytest.mark.parametrize(("predicted", "expected"), [(3.9, "disturbed"), (4.1, "quiet")])
def test_a_slower_split_is_no_baseline_for_a_disturbed_one(predicted: float, expected: str) -> None:
    """Its speedups would be too high: that of the disturbed one is reported as invalid instead."""
    times = {"quiet": (4.0, 4.0, True), "disturbed": (6.0, predicted, False)}
    rows: list[dict[str, Any]] = [
        {"mode": name, "variant": name, "step_seconds": [measured] * 3, "predicted_seconds": seconds, "valid": valid}
        for name, (measured, seconds, valid) in times.items()
    ]
    compared = {row["mode"]: row for row in cell_rows.compare(rows, {"best_stock": ["quiet", "disturbed"]})}
    assert compared["best_stock"]["variant"] == expected
    assert compared["best_stock"]["valid"] == (expected == "quiet")


def test_flat_stock_alone_is_not_best_stock() -> None:
    rows = [cell_rows.predicted_row(recorded(name), QualityRecord()) for name in ("stock", "exact")]
    compared = cell_rows.compare(rows, {})
    assert [row["mode"] for row in compared] == ["stock", "exact"]
    assert [row["speedup"] for row in compared] == [1, 1]
    assert [row["speedup_over_best_stock"] for row in compared] == [None, None]


def test_the_fastest_schedule_counts_where_autotuning_would_choose_it() -> None:
    parts = {
        "programs": {
            "step": one_block(RANKS, MESSAGE, BEFORE, AFTER),
            "slower": one_block(RANKS, MESSAGE, 2 * BEFORE, AFTER),
            "other": one_block(RANKS, MESSAGE, 0.001, 0.001),
            "slow": one_block(RANKS, MESSAGE, 0.001, 0.0012),
        },
        "alternatives": {"step": ["slower", "other", "slow"]},
    }
    row = cell_rows.predicted_row(recorded("exact", **parts), QualityRecord())
    assert row["schedule"] == {"step": "other"}
    assert row["predicted_seconds"] == pytest.approx(CALLS * BLOCKS * (0.002 + TRANSFER))


def test_schedules_that_are_clearly_slower_are_not_measured() -> None:
    """The own schedule stays, since autotuning compares the others with it."""
    parts = {
        "programs": {
            "step": one_block(RANKS, MESSAGE, 2 * BEFORE, AFTER),
            "best": one_block(RANKS, MESSAGE, BEFORE, AFTER),
            "near": one_block(RANKS, MESSAGE, BEFORE + 0.0004, AFTER),
            "slow": one_block(RANKS, MESSAGE, BEFORE + 0.0009, AFTER),
        },
        "alternatives": {"step": ["best", "near", "slow"]},
    }
    kept = recorded("exact", **parts).without_slow_alternatives()
    assert kept.alternatives == {"step": ["best", "near"]}
    assert list(kept.programs) == ["step", "best", "near"]


def test_only_splits_that_may_be_the_fastest_are_measured() -> None:
    def variant(name: str, transfers: float, like: str = "exact", is_other_split: bool = False) -> RecordedVariant:
        made = recorded(like, int(transfers * MESSAGE))
        return RecordedVariant(
            CELL, replace(made.variant, name=name, is_other_split=is_other_split), made.recording, made.counts
        )

    variants = [
        variant("stock", 9, "stock"),
        variant("stock 8x2", 1, "stock-combined"),
        variant("near", 1.02, "stock-combined"),
        variant("hopeless", 9, "stock-combined"),
        variant("exact", 3),
        variant("exact 4x2", 2, is_other_split=True),
        variant("exact 2x4", 2.5, is_other_split=True),
        variant("balanced", 1, "balanced"),
        variant("balanced 4x2", 2, "balanced", is_other_split=True),
        variant("fp8", 9, "fp8"),
    ]
    kept = [each.variant.name for each in cell_rows.worth_measuring(variants)]
    assert kept == ["stock", "stock 8x2", "near", "exact", "exact 4x2", "balanced", "fp8"]


def test_only_lossy_variants_have_a_psnr() -> None:
    rows = (
        {"mode": "balanced", "sweep": False, "series": "balanced", "codec": "", "psnr_db_mean": 41.0},
        {"mode": "balanced", "sweep": True, "series": "FP4 as in LightX2V", "codec": "FP4 as in LightX2V"}
        | {"psnr_db_mean": 23.0},
    )
    quality, step = QualityRecord(rows), one_block(RANKS, MESSAGE, BEFORE, AFTER)
    lossy = {"programs": {"step": step, KEYFRAME: step}, "weights": {"step": 0.9, KEYFRAME: 0.1}}

    def figures(variant: RecordedVariant) -> tuple[bool, float | None]:
        row = cell_rows.predicted_row(variant, quality)
        return row["lossless"], row["psnr_db"]

    assert figures(recorded("balanced@slow_axes=gpu", **lossy)) == (False, 41.0)
    assert figures(recorded("fast@slow_axes=gpu", **lossy)) == (False, None)
    assert figures(recorded("balanced")) == (True, None)  # without a slow axis
    assert figures(recorded("fp4")) == (False, 23.0)
    assert figures(recorded("fp8")) == (False, None)
    assert figures(recorded("stock")) == (True, None)
