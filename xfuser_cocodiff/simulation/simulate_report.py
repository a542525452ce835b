"""Tells simulated steps and their validation to people: tables for the console, and a chart."""

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from xfuser_cocodiff.reporting.colours import INK
from xfuser_cocodiff.reporting.words import INSTALL, percent, size, time
from xfuser_cocodiff.simulation.emulated import Cell
from xfuser_cocodiff.simulation.paper import LESS, MORE, Finding

CHART_FORMATS = (".svg", ".png", ".pdf")
_COLUMNS = (
    *("cluster", "nodes", "degree", "model", "px", "batch", "mode", "message", "share", "compute"),
    *("all-to-all", "ring", "hidden", "step", "speed-up", "plan"),
)
_COLOURS = ("#b8bec6", "#4f8a8b", "#8fb8a8", "#e0a458", "#c8553d", "#8f6f9f")


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Rows of a `simulate` record as a table."""
    found = Table(box=None)
    rings = any(row["ring_degree"] > 1 for row in rows)
    for column in _COLUMNS:
        if column != "ring" or rings:
            left = column in ("cluster", "model", "mode", "plan")
            found.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        found.add_row(
            row["cluster"],
            str(row["nodes"]),
            f"{row['degree']} x {row['ring_degree']}" if rings else str(row["degree"]),
            row["model"],
            str(row["resolution"]),
            str(row["batch"]),
            row["mode"],
            size(row["message_bytes"]),
            percent(row["share"]),
            time(row["compute_seconds"]),
            time(row["a2a_seconds"]),
            *([time(row["ring_seconds"])] if rings else []),
            time(row["hidden_seconds"]),
            time(row["step_seconds"]),
            f"{row['speedup']:.2f}",
            row["plan"],
        )
    return found


def validation_table(findings: Sequence[Finding]) -> Table:
    """Published figures beside simulated ones."""
    found = Table(box=None)
    for column in ("figure", "published", "simulated", "ratio", "", "likely reason"):
        found.add_column(column, justify="right" if column in ("published", "simulated", "ratio") else "left")
    for finding in findings:
        figures = (finding.published, finding.simulated, finding.ratio)
        published, simulated, ratio = (f"{value:.3g}" for value in figures)
        sign = {MORE: "> ", LESS: "< "}.get(finding.relation, "")
        found.add_row(finding.what, sign + published, simulated, ratio, finding.verdict, finding.reason)
    return found


def validation_record(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """The same as JSON values."""
    return [{**dataclasses.asdict(finding), "ratio": finding.ratio, "verdict": finding.verdict} for finding in findings]


def bench_table(cells: Sequence[Cell]) -> Table:
    """Measured steps beside simulated ones."""
    found = Table(box=None)
    for column in ("share", "mode", "measured", "simulated", "ratio", ""):
        found.add_column(column, justify="left" if column in ("mode", "") else "right")
    for cell in cells:
        verdict = "agrees" if cell.agrees else "differs"
        figures = time(cell.measured), time(cell.simulated), f"{cell.ratio:.2f}"
        found.add_row(f"{cell.share:.2f}", cell.mode, *figures, verdict)
    return found


def bench_record(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The same as JSON values."""
    return [{**dataclasses.asdict(cell), "ratio": cell.ratio, "agrees": cell.agrees} for cell in cells]


def check_chart(file: Path) -> None:
    """See that a chart can be drawn into `file`.

    Raises:
        ValueError: its name ends in nothing that a chart can be written as, or matplotlib is missing.
    """
    if file.suffix.lower() not in CHART_FORMATS:
        raise ValueError(f"--plot {str(file)!r} is not valid; its name must end in {', '.join(CHART_FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--plot needs matplotlib: {INSTALL}")


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw speed-ups: a panel per cluster, model, resolution and batch, a group of bars per number of nodes.

    Raises:
        ValueError: as :func:`check_chart` has it.
    """
    check_chart(file)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        panels.setdefault(tuple(row[key] for key in ("cluster", "model", "resolution", "batch")), []).append(row)
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    style = {"font.size": 8, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}
    with pyplot.rc_context({**style, "axes.edgecolor": INK, "svg.hashsalt": "cocodiff"}):
        figure, grid = pyplot.subplots(
            lines, columns, figsize=(1 + 2.8 * columns, 0.8 + 2.1 * lines), layout="constrained", squeeze=False
        )
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        for axes, ((cluster, model, resolution, batch), shown) in zip(grid.flat, panels.items(), strict=False):
            axes.set_title(f"{cluster}, {model}, {resolution} px, batch {batch}", fontsize=8)
            _draw_panel(axes, shown)
        entries = dict(zip(*reversed(grid.flat[0].get_legend_handles_labels()), strict=True))
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=6, frameon=False)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=150)
        pyplot.close(figure)


def _draw_panel(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    nodes, modes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("nodes", "mode"))
    width = 0.8 / len(modes)
    for number, mode in enumerate(modes):
        shown = [row for row in rows if row["mode"] == mode]
        places = [nodes.index(row["nodes"]) + (number - (len(modes) - 1) / 2) * width for row in shown]
        colour = _COLOURS[number % len(_COLOURS)]
        axes.bar(places, [row["speedup"] for row in shown], 0.9 * width, color=colour, label=mode)
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set_xticks(range(len(nodes)), [f"{count} node{'s' if count > 1 else ''}" for count in nodes])
    axes.set_ylabel("speed-up over stock")
    axes.spines[["top", "right"]].set_visible(False)
