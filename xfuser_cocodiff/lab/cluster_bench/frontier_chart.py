"""Draws speedup over best stock against PSNR: one picture per machine, with the frontier of its variants."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from xfuser_cocodiff.engine.settings.options import MODES
from xfuser_cocodiff.lab.cluster_bench.variants import BEST_MODES, BEST_STOCK, STOCK
from xfuser_cocodiff.lab.comparison.charts import AXIS_COLORS, INK, REST_COLOR

_EDGE = 5.0
"""Distance of the lossless variants, at the right edge, from the largest PSNR in dB."""
_MARGIN = 1.2
"""Factor between the largest speedup and the upper edge, and between the smallest and the lower one."""
_OWN_COLOR = AXIS_COLORS["node"]


@dataclass(frozen=True)
class Point:
    """A variant in the picture of a machine."""

    variant: str
    speedup: float
    """Geometric mean over the cells of the speedup over best stock."""
    psnr_db: float | None
    """None if it is lossless."""
    is_own: bool
    """Whether it is a mode of the plugin, and no rule of another system."""

    def dominates(self, other: "Point") -> bool:
        """Return whether it is at least as fast and as near to the lossless picture as another, and better in one."""
        own, their = (float("inf") if each.psnr_db is None else each.psnr_db for each in (self, other))
        return own >= their and self.speedup >= other.speedup and (own, self.speedup) != (their, other.speedup)


def points(cells: Iterable[dict[str, Any]]) -> list[Point]:
    """Return the variants of a machine's cells that are lossless or have a PSNR, best stock included.

    Invalid rows do not count, nor cells in which best stock is invalid, nor variants that only some of the cells have.
    Flat stock is left out where it is best stock in all cells. A variant that is lossy in any cell has the lowest PSNR
    of its lossy cells.
    """
    cells = [cell for cell in cells if _has_best_stock(cell)]
    found: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        for row in cell["rows"]:
            if row["valid"] is not False and not _is_split(row["mode"]):
                found.setdefault(row["mode"], []).append(row)
    if all(row["speedup_over_best_stock"] == 1 for row in found.get(STOCK, [])):
        found.pop(STOCK, None)
    return [
        Point(
            mode,
            geometric_mean(row["speedup_over_best_stock"] for row in rows),
            min((row["psnr_db"] for row in rows if not row["lossless"]), default=None),
            BEST_MODES.get(mode, mode).partition("/")[0].partition("@")[0] in MODES,
        )
        for mode, rows in found.items()
        if len(rows) == len(cells) and all(row["lossless"] or row["psnr_db"] is not None for row in rows)
    ]


def _has_best_stock(cell: dict[str, Any]) -> bool:
    return any(row["mode"] == BEST_STOCK and row["valid"] is not False for row in cell["rows"])


def missing(cells: Iterable[dict[str, Any]], every: Iterable[Point]) -> list[str]:
    """Return the variants of a machine's cells that are not drawn, other than splits of stock."""
    drawn = {each.variant for each in every}
    modes = dict.fromkeys(row["mode"] for cell in cells for row in cell["rows"])
    return [mode for mode in modes if mode not in drawn and mode != STOCK and not _is_split(mode)]


def _is_split(mode: str) -> bool:
    """Return whether a row is one of several splits, such as 'stock-combined 12x2'; the fastest has another row."""
    return " " in mode


def frontier(every: Sequence[Point]) -> list[Point]:
    """Return the points that no other point dominates, by PSNR, lossless ones last."""
    best = [each for each in every if not any(other.dominates(each) for other in every)]
    return sorted(best, key=lambda each: float("inf") if each.psnr_db is None else each.psnr_db)


def draw(record: dict[str, Any], file: Path) -> list[Path]:
    """Draw one picture per machine, and return their files: `file`, or with the machine in its name if there are more.

    Args:
        record: of `cocodiff bench cluster`.
        file: in any format that matplotlib writes.
    """
    machines = list(dict.fromkeys(cell["machine"] for cell in record["cells"]))
    files = []
    for machine in machines:
        out = file if len(machines) == 1 else file.with_name(f"{file.stem}-{machine}{file.suffix}")
        cells = [cell for cell in record["cells"] if cell["machine"] == machine]
        if every := points(cells):
            _draw(machine, every, missing(cells, every), out)
            files.append(out)
    return files


def _draw(machine: str, every: Sequence[Point], left_out: Sequence[str], file: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    decibels = [each.psnr_db for each in every if each.psnr_db is not None]
    edge = max(decibels, default=40.0) + _EDGE
    best = frontier(every)
    axes.axhline(1, color=REST_COLOR, linewidth=1)
    axes.axvline(edge, color=REST_COLOR, linewidth=1, linestyle=":")
    axes.plot([_x(each, edge) for each in best], [each.speedup for each in best], color=INK, linewidth=1, zorder=1)
    lossless = sorted((each for each in every if each.psnr_db is None), key=lambda each: each.speedup)
    for each in every:
        color, marker = (_OWN_COLOR, "o") if each.is_own else (INK, "s")
        face = color if each in best else "none"
        axes.plot(_x(each, edge), each.speedup, marker, color=color, markerfacecolor=face, zorder=2)
        label = each.variant.replace("best_", "best ")
        is_left = each in lossless and lossless.index(each) % 2 == 1  # neighbors would hide each other's labels
        offset, side = ((-6, -3), "right") if is_left else ((6, -3), "left")
        axes.annotate(
            label,
            (_x(each, edge), each.speedup),
            offset,
            textcoords="offset points",
            fontsize=8,
            horizontalalignment=side,
        )
    speedups = [each.speedup for each in every]
    axes.set_yscale("log")
    axes.set_ylim(min(speedups) / _MARGIN, max(speedups) * _MARGIN)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}x")
    axes.set_xlim(min(decibels, default=edge) - _EDGE, edge + _EDGE)
    ticks = [tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick < edge - 1]
    axes.set_xticks([*ticks, edge], [*(f"{tick:g}" for tick in ticks), "lossless"])
    axes.set(xlabel="PSNR to lossless, dB", ylabel=f"speedup over best stock, {machine}")
    notes = ["filled: on the frontier; circles: CoCoDiff; squares: others"]
    if left_out:
        notes.append(f"not in all cells, invalid or without PSNR: {', '.join(left_out)}")
    axes.set_title("\n".join(notes), loc="left", fontsize=7, color=INK)
    figure.savefig(file, dpi=150)


def _x(point: Point, edge: float) -> float:
    return edge if point.psnr_db is None else point.psnr_db
