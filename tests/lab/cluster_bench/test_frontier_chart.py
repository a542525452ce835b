"""The frontier of speedup and PSNR: who is on it, and what is drawn."""

from pathlib import Path
from typing import Any

from xfuser_cocodiff.lab.cluster_bench import frontier_chart


def row(mode: str, speedup: float, psnr_db: float | None = None, valid: bool | None = True) -> dict[str, Any]:
    """Return a row of a cell; lossless without a PSNR."""
    figures = {"lossless": psnr_db is None, "psnr_db": psnr_db, "valid": valid}
    return {"mode": mode, "variant": mode, "speedup_over_best_stock": speedup, **figures}


ROWS = [
    *(row("stock", 0.5), row("stock-combined 12x2", 1.0), {**row("best_stock", 1.0), "variant": "stock-combined 12x2"}),
    *(
        row("exact", 1.2),
        row("balanced", 2.0, 40.0),
        row("fast", 2.5, 35.0),
        row("fp4", 1.9, 23.0),
        row("fp8", 1.4, 45.0),
    ),
    row("int8", 3.0, 50.0, valid=False),
]


def test_dominated_variants_are_not_on_the_frontier() -> None:
    every = frontier_chart.points([{"rows": ROWS}])
    assert {each.variant for each in every} == {"stock", "best_stock", "exact", "balanced", "fast", "fp4", "fp8"}
    assert frontier_chart.missing([{"rows": ROWS}], every) == ["int8"]
    best = frontier_chart.frontier(every)
    assert [each.variant for each in best] == ["fast", "balanced", "fp8", "exact"]
    assert [each.is_own for each in best] == [True, True, False, True]


def test_speedups_are_geometric_means_over_cells_that_have_a_variant() -> None:
    cells = [{"rows": ROWS}, {"rows": [row("best_stock", 1.0), row("exact", 4.8)]}, {"rows": []}]
    cells.append({"rows": [row("best_stock", 1.0, valid=False), row("exact", 100.0)]})
    assert {each.variant: round(each.speedup, 6) for each in frontier_chart.points(cells)} == {
        "best_stock": 1.0,
        "exact": 2.4,
    }


def test_a_variant_that_is_lossy_in_one_cell_is_not_lossless() -> None:
    best = row("best_stock", 1.0)
    cells = [{"rows": [best, row("balanced", 1.0)]}, {"rows": [best, row("balanced", 4.0, 40.0)]}]
    assert {each.variant: each.psnr_db for each in frontier_chart.points(cells)}["balanced"] == 40.0


def test_flat_stock_is_drawn_unless_it_is_best_stock_in_all_cells() -> None:
    cells = [{"rows": [row("best_stock", 1.0), row("stock", speedup)]} for speedup in (1.0, 0.25)]
    assert [each.variant for each in frontier_chart.points(cells)] == ["best_stock", "stock"]
    assert [each.variant for each in frontier_chart.points(cells[:1])] == ["best_stock"]


def test_each_machine_has_a_picture(tmp_path: Path) -> None:
    cells = [{"machine": machine, "rows": ROWS} for machine in ("aurora", "pcie")]
    files = frontier_chart.draw({"cells": cells}, tmp_path / "frontier.png")
    assert [file.name for file in files] == ["frontier-aurora.png", "frontier-pcie.png"]
    assert all(file.stat().st_size > 1000 for file in files)
    assert frontier_chart.draw({"cells": cells[:1]}, tmp_path / "one.png") == [tmp_path / "one.png"]
