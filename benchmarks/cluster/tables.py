"""The tables of the documentation, in Markdown, from the records of a folder: python -m benchmarks.cluster.tables DIR

Nothing is predicted.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks import command_line
from benchmarks.cluster.rows import seconds
from benchmarks.cluster.rules import STOCK
from benchmarks.cluster.variants import BEST_STOCK
from xfuser_cocodiff.tools.reporting import record_file
from xfuser_cocodiff.tools.reporting.formatting import NOT_MEASURED, format_seconds
from xfuser_cocodiff.tools.simulation.machines import MACHINES

Cell = dict[str, Any]
MODES = ("exact", "balanced", "fast")
"""Columns of the first table, each in its fastest split."""
PARTS = {
    "TAPA": "tapa",
    "V-First": "v-first",
    "V-Major": "v-major",
    "all three": "paper",
    "`exact`": "exact",
    "`balanced`": "balanced",
}
"""Variants of the paper's table by column."""


def read_folder(folder: Path) -> list[Cell]:
    """Return the cells of all files `cluster-*.json` of a folder that xDiT can run, with their rows by mode."""
    cells = [cell for file in folder.glob("cluster-*.json") for cell in record_file.read(file)["cells"]]
    found = [{**cell, "rows": {row["mode"]: row for row in cell["rows"]}} for cell in cells if cell["rows"]]
    return sorted(found, key=lambda cell: [*MACHINES].index(cell["machine"]))


def machines_table(cells: Sequence[Cell]) -> list[str]:
    """Return the table of machines: best stock, its share of communication, and each mode in its fastest split.

    Lossy modes are left out where they equal `exact`, since no axis is slow for the device.
    """
    rows = []
    for cell in sorted(cells, key=lambda each: (each["model"], each["resolution"])):
        by_mode = cell["rows"]
        if (stock := by_mode.get(BEST_STOCK)) and "best_exact" in by_mode:
            machine = f"`{cell['machine']}`, {cell['ranks']}"
            step = f"{format_seconds(seconds(stock))}, {_split(stock)}"
            waits = f"{100 * stock['exposed_seconds'] / seconds(stock):.0f} %"
            modes = [by_mode.get(f"best_{mode}") for mode in MODES]
            speedups = [
                f"{seconds(stock) / seconds(row):.2f}x, {_split(row)}" if row else NOT_MEASURED for row in modes
            ]
            rows.append((f"{cell['model']}, {cell['resolution']} px", machine, step, waits, *speedups))
    return _markdown(("model", "machine, ranks", "best stock", "waits", *(f"`{mode}`" for mode in MODES)), rows)


def paper_table(cells: Sequence[Cell]) -> list[str]:
    """Return the paper's table on Aurora: each model at all resolutions, and the means by ranks and batch size.

    Speedups are over flat Ulysses, or over best stock for models that flat Ulysses cannot run; these are in no mean.
    """
    models, means = dict[str, list[Cell]](), dict[str, list[Cell]]()
    known = [cell for cell in cells if cell["machine"] == "aurora" and {*PARTS.values()} <= {*cell["rows"]}]
    for cell in sorted(known, key=lambda each: (each["batch"], each["ranks"], each["model"], each["resolution"])):
        if STOCK in cell["rows"]:
            means.setdefault(f"mean, {cell['ranks']}, batch {cell['batch']}", []).append(cell)
        if cell["batch"] == 1:
            models.setdefault(f"{cell['model']}, {cell['ranks']}", []).append(cell)
    rows = []
    for name, group in models.items():
        pixels = "/".join(str(cell["resolution"]) for cell in group)
        baseline = "" if STOCK in group[0]["rows"] else ", over best stock"
        speedups = ("/".join(f"{each:.2f}" for each in column) for column in _speedups(group))
        rows.append((f"{name}, {pixels} px{baseline}", *speedups))
    rows += [(name, *(f"{geometric_mean(each):.2f}" for each in _speedups(group))) for name, group in means.items()]
    return _markdown(("model, ranks", "bound", *PARTS), rows)


def _speedups(cells: Sequence[Cell]) -> list[list[float]]:
    """Return the speedups of cells by column: of their baseline without communication, and of each part."""
    return [[_speedup(cell, mode) for cell in cells] for mode in (None, *PARTS.values())]


def _speedup(cell: Cell, mode: str | None) -> float:
    baseline = cell["rows"].get(STOCK) or cell["rows"][BEST_STOCK]
    return seconds(baseline) / (seconds(cell["rows"][mode]) if mode else baseline["compute_seconds"])


def _split(row: dict[str, Any]) -> str:
    return f"{row['split']['ulysses']}x{row['split']['ring']}"


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(each)} |" for each in (columns, *rows)]
    return [lines[0], "|" + "---|" * len(columns), *lines[1:]]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables of a folder, and return the exit status."""
    parser = command_line.new_parser("cluster.tables", "Prints tables in Markdown.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of files cluster-*.json")
    cells = read_folder(parser.parse_args(argv).folder)
    print(*machines_table(cells), "", *paper_table(cells), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
