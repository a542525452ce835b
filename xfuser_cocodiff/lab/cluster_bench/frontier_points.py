"""Points of the frontier chart: speedup over best stock and PSNR of each variant on a machine, and its frontier."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from xfuser_cocodiff.engine.compression.mode_names import MODES
from xfuser_cocodiff.lab.cluster_bench.row_names import is_frontier_row, row_name
from xfuser_cocodiff.lab.cluster_bench.variants import BEST_MODES, BEST_STOCK, STOCK


@dataclass(frozen=True)
class Point:
    """A variant in the picture of a machine."""

    mode: str
    """Its `mode` in the record."""
    speedup: float
    """Geometric mean over the cells of the speedup over best stock."""
    psnr_db: float | None
    """None if it is lossless."""
    is_own: bool
    """Whether it is a mode of the plugin, and no rule of another system."""
    is_valid: bool = True
    """Whether it was measured in all cells, and all of its times are valid."""
    counts: bool = True
    """Whether it can be on the frontier: most of its times are valid, though it may have been invalid in some cells."""

    @property
    def name(self) -> str:
        """Name for readers."""
        return row_name(self.mode)

    def dominates(self, other: "Point") -> bool:
        """Return whether it has at least the speedup and the PSNR of another point, and more of one of them."""
        own, their = (float("inf") if each.psnr_db is None else each.psnr_db for each in (self, other))
        return own >= their and self.speedup >= other.speedup and (own, self.speedup) != (their, other.speedup)


@dataclass(frozen=True)
class Panel:
    """The points of a machine with a number of nodes."""

    machine: str
    """Name of the machine."""
    nodes: int
    """Number of its nodes."""
    cells: Sequence[dict[str, Any]]
    """Cells with a valid best stock; predicted ones only if none was measured."""
    points: Sequence[Point]
    without_psnr: Sequence[str]
    """Names of lossy variants whose PSNR was not measured in their exchange."""
    in_some_cells: Sequence[str]
    """Names of variants that only some of the cells have."""


def panels(cells: Iterable[dict[str, Any]]) -> list[Panel]:
    """Return the panels of a machine by number of nodes, without those that no cell has a best stock for."""
    of_nodes: dict[int, list[dict[str, Any]]] = {}
    for cell in cells:
        if _has_best_stock(cell) and cell.get("batch", 1) == 1:
            of_nodes.setdefault(cell["nodes"], []).append(cell)
    found = []
    for nodes, usable in sorted(of_nodes.items()):
        measured = [cell for cell in usable if not cell["predicted"]]
        found.append(_panel(nodes, measured or usable))
    return found


def _panel(nodes: int, cells: Sequence[dict[str, Any]]) -> Panel:
    rows: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        for row in cell["rows"]:
            if is_frontier_row(row["mode"]):
                rows.setdefault(row["mode"], []).append(row)
    complete = {mode: of_mode for mode, of_mode in rows.items() if len(of_mode) == len(cells)}
    for best, mode in {**BEST_MODES, STOCK: BEST_STOCK}.items():
        if best in complete and _is_same(complete[best], complete.get(mode, [])):
            del complete[best]
    with_psnr = {mode: of_mode for mode, of_mode in complete.items() if _has_psnr(of_mode)}
    return Panel(
        cells[0]["machine"],
        nodes,
        cells,
        [_point(mode, of_mode) for mode, of_mode in with_psnr.items()],
        [row_name(mode) for mode in complete if mode not in with_psnr],
        [row_name(mode) for mode, of_mode in rows.items() if len(of_mode) < len(cells)],
    )


def frontier(every: Sequence[Point]) -> list[Point]:
    """Return the points that no other point dominates, by PSNR, lossless ones last.

    Points that are mostly predicted or invalid do not count, unless all are.
    """
    counted = [each for each in every if each.counts] or list(every)
    best = [each for each in counted if not any(other.dominates(each) for other in counted)]
    return sorted(best, key=lambda each: float("inf") if each.psnr_db is None else each.psnr_db)


def _point(mode: str, rows: Sequence[dict[str, Any]]) -> Point:
    """Return the point of a mode; one that is lossy in any cell has the lowest PSNR of its lossy cells."""
    return Point(
        mode,
        geometric_mean(row["speedup_over_best_stock"] for row in rows),
        min((row["psnr_db"] for row in rows if not row["lossless"]), default=None),
        BEST_MODES.get(mode, mode).partition("@")[0] in MODES,
        all(row["valid"] for row in rows),
        sum(bool(row["valid"]) for row in rows) > len(rows) / 2,
    )


def _has_psnr(rows: Sequence[dict[str, Any]]) -> bool:
    return all(row["lossless"] or row["psnr_db"] is not None for row in rows)


def _is_same(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> bool:
    """Return whether two variants have the same speedup in each cell, so that one point stands for both."""
    speedups = ([row["speedup_over_best_stock"] for row in each] for each in (rows, others))
    own, their = speedups
    return own == their


def _has_best_stock(cell: dict[str, Any]) -> bool:
    return any(row["mode"] == BEST_STOCK and row["valid"] is not False for row in cell["rows"])
