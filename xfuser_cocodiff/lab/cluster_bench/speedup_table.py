"""The table of speedups over best stock, by machine and mode."""

from collections.abc import Sequence
from typing import Any

from xfuser_cocodiff.lab.cluster_bench import cell_speedups
from xfuser_cocodiff.lab.cluster_bench.cell_speedups import find_speedup, mean_speedup
from xfuser_cocodiff.lab.cluster_bench.variants import BEST_STOCK
from xfuser_cocodiff.lab.reporting.formatting import NOT_MEASURED

_MODES = {
    "exact": "`exact`",
    "best_exact": "fastest split",
    "balanced": "`balanced`",
    "best_balanced": "fastest split",
    "fast": "`fast`",
    "best_fast": "fastest split",
    "paper": "`paper`",
}
"""Name of each mode's column."""
_SLOW_AXES = "@slow_axes="


def speedup_table(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the table in Markdown: geometric means over the cells of a machine with so many nodes.

    Each entry has the number of its cells if some are invalid or lack a time. Predicted cells count only where none was
    measured. Where an axis has to be named for a lossy mode, that variant counts.
    """
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for cell in cells:
        if cell["rows"] and cell["batch"] == 1:
            groups.setdefault((cell["machine"], cell["nodes"]), []).append(cell)
    rows = []
    for (machine, _), group in sorted(groups.items()):
        counted = [cell for cell in group if not cell["predicted"]] or group
        values = [_mean(counted, mode) for mode in _MODES]
        rows.append((f"`{machine}`, {counted[0]['ranks']}", str(len(counted)), *values))
    return cell_speedups.markdown_table(("machine, ranks", "cells", *_MODES.values()), rows)


def _mean(cells: Sequence[dict[str, Any]], mode: str) -> str:
    """Return the mean speedup of a mode, and in parentheses of how many cells it is, if these are not all."""
    found = [find_speedup([cell], _named(cell, mode), BEST_STOCK) for cell in cells]
    mean, count = mean_speedup(found), sum(each is not None for each in found)
    if mean is None:
        return NOT_MEASURED
    return str(mean) if count == len(cells) else f"{mean}({count})"


def _named(cell: dict[str, Any], mode: str) -> str:
    """Return the name of a mode's row: that of a variant with named slow axes where the mode has no row of its own."""
    modes = [row["mode"] for row in cell["rows"]]
    return next((each for each in modes if mode not in modes and each.startswith(mode + _SLOW_AXES)), mode)
