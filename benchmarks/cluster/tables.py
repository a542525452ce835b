"""Tables in Markdown of the records of a folder: python -m benchmarks.cluster.tables DIR

Speedups by machine and mode, and the paper's table on Aurora. Nothing is predicted.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks import command_line
from benchmarks.cluster.rows import seconds
from benchmarks.cluster.variants import BEST_STOCK, STOCK
from xfuser_cocodiff.lab.reporting import record_file
from xfuser_cocodiff.lab.reporting.formatting import NOT_MEASURED
from xfuser_cocodiff.lab.simulation.machines import MACHINES

Cells = Sequence[dict[str, Any]]
MODES = {
    "exact": "`exact`",
    "best_exact": "fastest split",
    "balanced": "`balanced`",
    "best_balanced": "fastest split",
    "fast": "`fast`",
    "best_fast": "fastest split",
    "paper": "`paper`",
}
"""Name of each mode's column."""
PARTS = {
    "TAPA": "exact@v_first=off@head_groups=1",
    "V-First": "v-first",
    "V-Major": "paper@v_first=off@head_groups=1",
    "all three": "paper",
    "`exact`": "exact",
    "`balanced`": "balanced",
}
"""Modes of the paper's table by column: TAPA is the hierarchical all-to-all alone."""
PAPER_MODELS = {"sd3.5-large": "SD3.5", "flux.1-dev": "FLUX.1", "qwen-image": "Qwen-Image", "flux.2-dev": "FLUX.2"}
PAPER_SIZES, PAPER_NODES, BATCHED_SIZE, PEAK_SIZE, PEAK_NODES = (768, 1536, 2304), (1, 2), 1536, 2304, 4
"""The paper's means are over batches of 1 to 32, hence a larger one. PEAK: its largest speedup, of SD3.5."""
PUBLISHED = (
    ("the paper: mean/12/24 to 96 ranks", "-", "2.3/2.3/2.2", "1.3/little/1.3", "2.9/-/2.9", "3.6/2.5/5.1", "-", "-"),
    ("the paper: SD3.5, 2304 px, 48", "-", "-", "-", "-", "8.4", "-", "-"),
)
"""Speedups that arXiv 2604.14561 states."""


def read_folder(folder: Path) -> list[dict[str, Any]]:
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


def _has_own_launch_time(cell: dict[str, Any]) -> bool:
    return math.isclose(cell["launch_us"], 1e6 * MACHINES[cell["machine"]].accelerator.launch_seconds)


def speedup_table(cells: Cells) -> list[str]:
    """Return the table of speedups over best stock: geometric means over the cells of a machine with so many nodes.

    Where an axis has to be named for a lossy mode, that variant counts.
    """
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for cell in cells:
        if cell["rows"] and cell["batch"] == 1:
            groups.setdefault((cell["machine"], cell["ranks"]), []).append(cell)
    rows = [
        (f"`{machine}`, {ranks}", str(len(group)), *(_mean(group, mode, BEST_STOCK) for mode in MODES))
        for (machine, ranks), group in sorted(groups.items())
    ]
    return _markdown(("machine, ranks", "cells", *MODES.values()), rows)


def paper_table(cells: Cells) -> list[str]:
    """Return the paper's table on Aurora, by its columns: the bound and :data:`PARTS`.

    Speedups are over flat Ulysses, or over best stock for models that flat Ulysses cannot run; these are in no mean.
    The bound is the speedup without any communication.
    """
    found = {
        (cell["model"], cell["nodes"], cell["resolution"], cell["batch"]): cell
        for cell in cells
        if cell["machine"] == "aurora" and cell["rows"]
    }
    rows = []
    for nodes in PAPER_NODES:
        for model, name in PAPER_MODELS.items():
            of_sizes = [found.get((model, nodes, size, 1)) for size in PAPER_SIZES]
            baseline = STOCK if all(_has_flat(cell) for cell in of_sizes if cell) else BEST_STOCK
            mark = " (best stock)" if baseline == BEST_STOCK else ""
            rows.append((f"{name}, {12 * nodes}{mark}", *_columns(_each, of_sizes, baseline)))
    for title, sizes, batch in (("mean", PAPER_SIZES, 1), (f"mean, {BATCHED_SIZE} px, batch 8", (BATCHED_SIZE,), 8)):
        for nodes in PAPER_NODES:
            every = [found.get((model, nodes, size, batch)) for model in PAPER_MODELS for size in sizes]
            flat = [cell for cell in every if cell and _has_flat(cell)]
            rows.append((f"{title}, {12 * nodes}", *_columns(_mean, flat, STOCK)))
    peak = [found.get(("sd3.5-large", PEAK_NODES, PEAK_SIZE, 1))]
    name = f"SD3.5, {PEAK_SIZE} px, {12 * PEAK_NODES} (best stock)"
    rows.append((name, *_columns(_each, peak, BEST_STOCK)))
    return _markdown(("model, ranks", "bound", *PARTS), [*rows, *PUBLISHED])


def _columns(text_of: Callable[..., str], cells: Sequence[dict[str, Any] | None], baseline: str) -> list[str]:
    return [text_of(cells, mode, baseline) for mode in (None, *PARTS.values())]


def _has_flat(cell: dict[str, Any]) -> bool:
    return any(row["mode"] == STOCK for row in cell["rows"])


def _speedup(cell: dict[str, Any] | None, mode: str | None, baseline: str) -> float | None:
    """Return the speedup of a mode, or for None of the baseline without communication; None if it is unknown."""
    rows = {row["mode"]: row for row in cell["rows"]} if cell else {}
    if mode not in (None, *rows):  # a lossy mode whose slow axes are named
        mode = next((each for each in rows if each.startswith(f"{mode}@slow_axes=")), mode)
    if baseline not in rows or mode not in (None, *rows):
        return None
    return seconds(rows[baseline]) / (seconds(rows[mode]) if mode else rows[baseline]["compute_seconds"])


def _each(cells: Iterable[dict[str, Any] | None], mode: str | None, baseline: str) -> str:
    """Return the speedups of several cells; one dash if all are unknown."""
    found = [_speedup(cell, mode, baseline) for cell in cells]
    return "/".join(_format(each) for each in found) if any(found) else NOT_MEASURED


def _mean(cells: Iterable[dict[str, Any]], mode: str | None, baseline: str) -> str:
    """Return the mean speedup, with the number of its cells if some have none."""
    found = [_speedup(cell, mode, baseline) for cell in cells]
    known = [each for each in found if each]
    count = f"({len(known)})" if 0 < len(known) < len(found) else ""
    return _format(geometric_mean(known) if known else None) + count


def _format(speedup: float | None) -> str:
    return NOT_MEASURED if speedup is None else f"{speedup:.2f}"


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
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
