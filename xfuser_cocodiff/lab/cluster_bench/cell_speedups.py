"""Speedups of the cells of a record: measured and valid, or else predicted."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from xfuser_cocodiff.lab.cluster_bench.cell_rows import row_seconds
from xfuser_cocodiff.lab.reporting.formatting import NOT_MEASURED


@dataclass(frozen=True)
class Speedup:
    """Speedup of a mode over a baseline."""

    value: float
    is_measured: bool = True
    """False if it is predicted."""

    def __str__(self) -> str:
        return format_speedup(f"{self.value:.2f}", self.is_measured)


def format_speedup(text: str, is_measured: bool) -> str:
    """Return a speedup for a Markdown table: in italics where it is predicted."""
    return text if is_measured else f"*{text}*"


def find_speedup(cells: Sequence[dict[str, Any]], mode: str, baseline: str) -> Speedup | None:
    """Return the speedup of a mode in several records of one cell; None if none has it.

    A measured speedup counts only where both times are valid; otherwise it is the predicted one. Both times are of the
    same record.

    Args:
        cells: a cell as it was measured, and as it was predicted.
        mode: `mode` of the row.
        baseline: `mode` of the baseline's row.
    """
    for needs_valid in (True, False):
        for cell in cells:
            rows = {row["mode"]: row for row in cell["rows"]}
            pair = [rows[name] for name in (baseline, mode) if name in rows]
            if len(pair) == 2 and (all(row["valid"] for row in pair) if needs_valid else cell["predicted"]):
                return Speedup(row_seconds(pair[0]) / row_seconds(pair[1]), needs_valid)
    return None


def find_bound(cells: Sequence[dict[str, Any]], baseline: str) -> Speedup | None:
    """Return the speedup of the baseline without communication: what no schedule exceeds. See :func:`find_speedup`."""
    for needs_valid in (True, False):
        for cell in cells:
            row = next((row for row in cell["rows"] if row["mode"] == baseline), None)
            if row and (row["valid"] if needs_valid else cell["predicted"]):
                return Speedup(row_seconds(row) / row["compute_seconds"], needs_valid)
    return None


def mean_speedup(speedups: Iterable[Speedup | None]) -> Speedup | None:
    """Return the geometric mean of the known speedups, measured if all of them are; None without any."""
    known = [each for each in speedups if each]
    if not known:
        return None
    return Speedup(geometric_mean(each.value for each in known), all(each.is_measured for each in known))


def format_all(speedups: Iterable[Speedup | None]) -> str:
    """Return several speedups for one cell of a Markdown table; a dash for unknown ones, and one if all are."""
    texts = [str(each) if each else NOT_MEASURED for each in speedups]
    return NOT_MEASURED if {*texts} <= {NOT_MEASURED} else "/".join(texts)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [f"| {' | '.join(each)} |" for each in (columns, *rows)]
    return [lines[0], "|" + "---|" * len(columns), *lines[1:]]
