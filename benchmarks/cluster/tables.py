"""Tables in Markdown of the records of a folder: python -m benchmarks.cluster.tables DIR

Speedups by machine and mode, and the paper's table on Aurora. Nothing is predicted.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks import command_line
from benchmarks.cluster.rows import seconds
from benchmarks.cluster.variants import BEST_STOCK, STOCK
from xfuser_cocodiff.tools.reporting import record_file
from xfuser_cocodiff.tools.reporting.formatting import NOT_MEASURED
from xfuser_cocodiff.tools.simulation.machines import MACHINES

Cell = dict[str, Any]
MODES = ("exact", "best_exact", "balanced", "best_balanced", "fast", "best_fast", "paper")
"""Columns of the first table."""
PARTS = {
    "bound": None,
    "TAPA": "exact@v_first=off@head_groups=1",
    "V-First": "v-first",
    "V-Major": "paper@v_first=off@head_groups=1",
    "all three": "paper",
    "`exact`": "exact",
    "`balanced`": "balanced",
}
"""Modes of the paper's table by column: the speedup without communication, TAPA (the hierarchical all-to-all alone)."""
PAPER_MODELS = ("sd3.5-large", "flux.1-dev", "qwen-image", "flux.2-dev")


def read_folder(folder: Path) -> list[Cell]:
    """Return the cells of all files `cluster-*.json` of a folder; of the same cell, the newest.

    Cells with `--launch-us` are left out: a mean with CUDA graphs would be of no machine.

    Raises:
        ValueError: there is no such file, or one is no record of `benchmarks.cluster`.
    """
    try:
        records = [record_file.read(file) for file in folder.glob("cluster-*.json")]
        cells = [cell for record in sorted(records, key=lambda each: each["created"]) for cell in record["cells"]]
        keys = ("machine", "nodes", "model", "resolution", "batch", "text_tokens")
        return [*{tuple(cell[key] for key in keys): cell for cell in cells if _has_own_launch_time(cell)}.values()]
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: {error!r}; its cluster-*.json are to be what `benchmarks.cluster` wrote") from None


def _has_own_launch_time(cell: Cell) -> bool:
    return math.isclose(cell["launch_us"], 1e6 * MACHINES[cell["machine"]].accelerator.launch_seconds)


def speedup_table(cells: Sequence[Cell]) -> list[str]:
    """Return the table of speedups over best stock: geometric means over the cells of a machine with so many nodes."""
    groups: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda each: (each["machine"], each["ranks"])):
        if cell["rows"] and cell["batch"] == 1:
            groups.setdefault(f"`{cell['machine']}`, {cell['ranks']}", []).append(cell)
    rows = [
        (name, str(len(group)), *(_mean(group, mode, BEST_STOCK) for mode in MODES)) for name, group in groups.items()
    ]
    return _markdown(("machine, ranks", "cells", *MODES), rows)


def paper_table(cells: Sequence[Cell]) -> list[str]:
    """Return the paper's table on Aurora: each cell of a model, and the means by batch size.

    Speedups are over flat Ulysses, or over best stock for models that flat Ulysses cannot run; these are in no mean.
    """
    rows, means = [], dict[str, list[Cell]]()
    known = [cell for cell in cells if cell["machine"] == "aurora" and cell["rows"] and cell["model"] in PAPER_MODELS]
    for cell in sorted(known, key=lambda each: (each["ranks"], PAPER_MODELS.index(each["model"]), each["resolution"])):
        has_flat = any(row["mode"] == STOCK for row in cell["rows"])
        baseline, sizes = STOCK if has_flat else BEST_STOCK, f"{cell['ranks']}, batch {cell['batch']}"
        if has_flat:
            means.setdefault(f"mean, {sizes}", []).append(cell)
        if cell["batch"] == 1:
            mark = "" if has_flat else " (best stock)"
            title = f"{cell['model']}, {cell['resolution']} px, {cell['ranks']}{mark}"
            rows.append((title, *(_mean([cell], mode, baseline) for mode in PARTS.values())))
    rows += [(name, *(_mean(group, mode, STOCK) for mode in PARTS.values())) for name, group in means.items()]
    return _markdown(("model, ranks", *PARTS), rows)


def _speedup(cell: Cell, mode: str | None, baseline: str) -> float | None:
    """Return the speedup of a mode, or for None of the baseline without communication; None if it is unknown.

    Where an axis has to be named for a lossy mode, that variant counts.
    """
    rows = {row["mode"]: row for row in cell["rows"]}
    if mode not in (None, *rows):
        mode = next((each for each in rows if each.startswith(f"{mode}@slow_axes=")), mode)
    if baseline not in rows or mode not in (None, *rows):
        return None
    return seconds(rows[baseline]) / (seconds(rows[mode]) if mode else rows[baseline]["compute_seconds"])


def _mean(cells: Sequence[Cell], mode: str | None, baseline: str) -> str:
    """Return the mean speedup, with the number of its cells if some have none."""
    known = [each for cell in cells if (each := _speedup(cell, mode, baseline))]
    count = f"({len(known)})" if 0 < len(known) < len(cells) else ""
    return f"{geometric_mean(known):.2f}{count}" if known else NOT_MEASURED


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(each)} |" for each in (columns, *rows)]
    return [lines[0], "|" + "---|" * len(columns), *lines[1:]]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables of a folder, and return the exit status."""
    parser = command_line.new_parser("cluster.tables", "Prints tables in Markdown.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of files cluster-*.json")
    return command_line.run(parser, _show, argv)


def _show(options: argparse.Namespace) -> int:
    cells = read_folder(options.folder)
    print(*speedup_table(cells), "", *paper_table(cells), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
