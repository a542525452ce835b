"""The picture of speedup and PSNR: its rows, who is on the frontier, and where labels are."""

import itertools
from pathlib import Path
from typing import Any

from xfuser_cocodiff.lab.cluster_bench import frontier_chart
from xfuser_cocodiff.lab.cluster_bench.frontier_points import Panel, frontier, panels
from xfuser_cocodiff.lab.cluster_bench.row_names import TAPA


def row(mode: str, speedup: float, psnr_db: float | None = None, valid: bool | None = True) -> dict[str, Any]:
    """Return a row of a cell; lossless without a PSNR."""
    figures = {"lossless": psnr_db is None, "psnr_db": psnr_db, "valid": valid}
    return {"mode": mode, "variant": mode, "speedup_over_best_stock": speedup, **figures}


def cell(*rows: dict[str, Any], nodes: int = 2, predicted: bool = False) -> dict[str, Any]:
    """Return a cell of a machine."""
    model = {"machine": "aurora", "model": "flux.1-dev", "resolution": 1536}
    return {**model, "nodes": nodes, "ranks": 12 * nodes, "predicted": predicted, "rows": list(rows)}


BEST = row("best_stock", 1.0)
ROWS = [
    *(row("stock", 0.5), row("stock-combined 12x2", 1.0), {**BEST, "variant": "stock-combined 12x2"}),
    *(
        row("exact", 1.2),
        row("balanced", 2.0, 40.0),
        row("fast", 2.5, 35.0),
        row("fp4", 1.9, 23.0),
        row("fp8", 1.4, 45.0),
        row(TAPA, 1.1),
    ),
    row("int8", 3.0, 50.0, valid=False),
]


def only_panel(*cells: dict[str, Any]) -> Panel:
    """Return the panel of cells with equally many nodes."""
    [panel] = panels(cells)
    return panel


def test_dominated_and_invalid_variants_are_not_on_the_frontier() -> None:
    every = only_panel(cell(*ROWS)).points
    shown = ["stock", "best_stock", "exact", "balanced", "fast", "fp4", "fp8", "int8"]
    assert [each.mode for each in every] == shown
    best = frontier(every)
    assert [each.mode for each in best] == ["fast", "balanced", "fp8", "exact"]
    assert [each.is_own for each in best] == [True, True, False, True]
    assert [each.mode for each in every if not each.is_valid] == ["int8"]


def test_one_invalid_time_of_three_takes_no_variant_off_the_frontier() -> None:
    cells = [cell(BEST, row("exact", 1.5, valid=valid), row("v-first", 2.0, valid=not valid)) for valid in (True,) * 2]
    cells.append(cell(BEST, row("exact", 1.5, valid=False), row("v-first", 2.0)))
    every = only_panel(*cells).points
    assert [each.mode for each in frontier(every)] == ["exact"]
    assert [each.mode for each in every if each.is_valid] == ["best_stock"]


def test_the_frontier_of_predicted_rows_is_drawn_if_none_was_measured() -> None:
    rows = [row("best_stock", 1.0, valid=None), row("exact", 1.2, valid=None), row("fast", 1.1, 30.0, valid=None)]
    panel = only_panel(cell(*rows, predicted=True))
    assert [each.mode for each in frontier(panel.points)] == ["exact"]
    assert not any(each.is_valid for each in panel.points)
    assert len(only_panel(cell(*rows, predicted=True), cell(*ROWS)).cells) == 1, "measured cells count alone"


def test_speedups_are_geometric_means_over_cells_with_a_valid_best_stock() -> None:
    cells = [cell(*ROWS), cell(BEST, row("exact", 4.8)), cell()]
    cells.append(cell(row("best_stock", 1.0, valid=False), row("exact", 100.0)))
    panel = only_panel(*cells)
    assert {each.mode: round(each.speedup, 6) for each in panel.points} == {"best_stock": 1.0, "exact": 2.4}
    assert "FP4 (LightX2V)" in panel.in_some_cells and panel.without_psnr == []


def test_a_variant_that_is_lossy_in_one_cell_is_not_lossless() -> None:
    panel = only_panel(cell(BEST, row("balanced", 1.0)), cell(BEST, row("balanced", 4.0, 40.0)))
    assert {each.mode: each.psnr_db for each in panel.points}["balanced"] == 40.0


def test_a_lossy_variant_without_psnr_is_named_and_not_drawn() -> None:
    lossy = {**row("best_balanced", 2.0), "lossless": False}
    panel = only_panel(cell(BEST, lossy))
    assert [each.mode for each in panel.points] == ["best_stock"]
    assert panel.without_psnr == ["balanced, fastest split"]


def test_rows_that_repeat_another_one_in_all_cells_are_not_drawn() -> None:
    cells = [cell(BEST, row("stock", speedup), row("exact", 1.5), row("best_exact", 1.5)) for speedup in (1.0, 0.25)]
    assert [each.mode for each in only_panel(*cells).points] == ["best_stock", "stock", "exact"]
    assert [each.mode for each in only_panel(cells[0]).points] == ["best_stock", "exact"]


def test_labels_cover_neither_each_other_nor_points() -> None:
    crowded = [row(f"balanced@schedule=bits={number}", 2.0 + number / 50, 40.0 + number / 9) for number in range(8)]
    equal = [row(mode, 1.0) for mode in ("exact", "v-first", "kv-gather", "best_exact")]
    drawn = panels([cell(*ROWS, *crowded, *equal[1:]), cell(*equal, BEST, nodes=4)])
    figure = frontier_chart.draw_machine(drawn)
    assert [len(axes.texts) for axes in figure.axes] == [len(panel.points) for panel in drawn]
    for axes, panel in zip(figure.axes, drawn, strict=True):
        boxes = [text.get_window_extent() for text in axes.texts]
        assert not [1 for one, other in itertools.combinations(boxes, 2) if one.overlaps(other)]
        pixels = [axes.transData.transform((point.psnr_db, point.speedup)) for point in panel.points if point.psnr_db]
        assert not [1 for box in boxes for point in pixels if box.contains(*point)]
        assert {text.get_text() for text in axes.texts} == {point.name for point in panel.points}


def test_each_machine_has_a_picture_with_a_panel_per_number_of_nodes(tmp_path: Path) -> None:
    cells = [{**cell(*ROWS, nodes=nodes), "machine": machine} for machine in ("aurora", "pcie") for nodes in (1, 2)]
    files = frontier_chart.draw({"cells": cells}, tmp_path / "frontier.png")
    assert [file.name for file in files] == ["frontier-aurora.png", "frontier-pcie.png"]
    assert all(file.stat().st_size > 1000 for file in files)
    assert frontier_chart.draw({"cells": cells[:1]}, tmp_path / "one.png") == [tmp_path / "one.png"]
