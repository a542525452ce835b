"""The paper's table on Aurora: speedups of its parts, alone and together, beside the paper's own figures."""

from collections.abc import Sequence
from typing import Any

from xfuser_cocodiff.lab.cluster_bench import cell_speedups
from xfuser_cocodiff.lab.cluster_bench.cell_speedups import Speedup, find_bound, find_speedup, mean_speedup
from xfuser_cocodiff.lab.cluster_bench.row_names import TAPA, TAPA_AND_V_MAJOR, model_name
from xfuser_cocodiff.lab.cluster_bench.variants import BEST_STOCK, STOCK
from xfuser_cocodiff.lab.reporting.formatting import NOT_MEASURED

MACHINE = "aurora"
MODELS = ("sd3.5-large", "flux.1-dev", "qwen-image", "flux.2-dev")
RESOLUTIONS = (768, 1536, 2304)
NODES = (1, 2)
BATCH, BATCH_RESOLUTION = 8, 1536
"""A larger batch, since the paper's means are over batches of 1 to 32."""
PEAK = ("sd3.5-large", 4, 2304)
"""Model, nodes and resolution of the paper's largest speedup."""
_PARTS = {
    "TAPA": TAPA,
    "V-First": "v-first",
    "V-Major": TAPA_AND_V_MAJOR,
    "all three": "paper",
    "`exact`": "exact",
    "`balanced`": "balanced",
}
_PAPER = {
    "the paper: mean/12/24 to 96 ranks": ("2.3/2.3/2.2", "1.3/little/1.3", "2.9/-/2.9", "3.6/2.5/5.1"),
    "the paper: SD3.5, 2304 px, 48": (NOT_MEASURED, NOT_MEASURED, NOT_MEASURED, "8.4"),
}
"""Speedups that arXiv 2604.14561 states, for TAPA, V-First, V-Major and all three."""


def paper_table(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the table in Markdown.

    Speedups are over flat Ulysses, or over best stock for models that flat Ulysses cannot run; these are in no mean.
    The bound is the speedup without any communication.

    Args:
        cells: of records of Aurora; others are left out.
    """
    rows = [_model_row(cells, model, nodes) for nodes in NODES for model in MODELS]
    rows += [_mean_row(cells, nodes) for nodes in NODES]
    rows += [_batch_row(cells, nodes) for nodes in NODES]
    rows.append(_peak_row(cells))
    rows += [(name, NOT_MEASURED, *figures, NOT_MEASURED, NOT_MEASURED) for name, figures in _PAPER.items()]
    columns = ("model, ranks", "bound", *_PARTS)
    return cell_speedups.markdown_table(columns, rows)


def _model_row(cells: Sequence[dict[str, Any]], model: str, nodes: int) -> tuple[str, ...]:
    of_sizes = [_of(cells, model, nodes, resolution) for resolution in RESOLUTIONS]
    bounds = [find_bound(each, _baseline(each)) for each in of_sizes]
    parts = [[find_speedup(each, mode, _baseline(each)) for each in of_sizes] for mode in _PARTS.values()]
    mark = " (best stock)" if any(_baseline(each) == BEST_STOCK for each in of_sizes if each) else ""
    return f"{model_name(model)}, {12 * nodes}{mark}", *map(cell_speedups.format_all, (bounds, *parts))


def _mean_row(cells: Sequence[dict[str, Any]], nodes: int) -> tuple[str, ...]:
    every = [_of(cells, model, nodes, resolution) for model in MODELS for resolution in RESOLUTIONS]
    return f"mean, {12 * nodes}", *_means(every)


def _batch_row(cells: Sequence[dict[str, Any]], nodes: int) -> tuple[str, ...]:
    every = [_of(cells, model, nodes, BATCH_RESOLUTION, BATCH) for model in MODELS]
    return f"mean, {BATCH_RESOLUTION} px, batch {BATCH}, {12 * nodes}", *_means(every)


def _means(every: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """Return the means over cells whose baseline is flat Ulysses."""
    flat = [each for each in every if each and _baseline(each) == STOCK]
    bound = mean_speedup(find_bound(each, STOCK) for each in flat)
    parts = [mean_speedup(find_speedup(each, mode, STOCK) for each in flat) for mode in _PARTS.values()]
    return [_text(each) for each in (bound, *parts)]


def _peak_row(cells: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    model, nodes, resolution = PEAK
    found = _of(cells, *PEAK)
    parts = [find_speedup(found, mode, BEST_STOCK) for mode in _PARTS.values()]
    name = f"{model_name(model)}, {resolution} px, {12 * nodes} (best stock)"
    return name, *(_text(each) for each in (find_bound(found, BEST_STOCK), *parts))


def _of(
    cells: Sequence[dict[str, Any]], model: str, nodes: int, resolution: int, batch: int = 1
) -> list[dict[str, Any]]:
    """Return a cell as it was measured, and as it was predicted."""
    wanted = (MACHINE, model, nodes, resolution, batch)
    keys = ("machine", "model", "nodes", "resolution", "batch")
    found = [cell for cell in cells if tuple(cell[key] for key in keys) == wanted and cell["rows"]]
    return sorted(found, key=lambda cell: cell["predicted"])


def _baseline(cells: Sequence[dict[str, Any]]) -> str:
    """Return flat Ulysses, or best stock if the model's heads do not allow it."""
    has_flat = any(row["mode"] == STOCK for cell in cells for row in cell["rows"])
    return STOCK if has_flat else BEST_STOCK


def _text(speedup: Speedup | None) -> str:
    return NOT_MEASURED if speedup is None else str(speedup)
