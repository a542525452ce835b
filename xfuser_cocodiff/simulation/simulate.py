"""`cocodiff simulate`: predicted steps of models of real size on machines that are known on paper."""

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from xfuser_cocodiff.reporting.colours import INK
from xfuser_cocodiff.reporting.words import INSTALL, percent, time
from xfuser_cocodiff.settings.options import MODES as OURS
from xfuser_cocodiff.simulation.machines import MACHINES, Machine
from xfuser_cocodiff.simulation.plan_model import check_count, check_name
from xfuser_cocodiff.simulation.prediction import STOCK, Case, predictions
from xfuser_cocodiff.simulation.workloads import PIXELS_PER_TOKEN, WORKLOADS, Workload

MODES = (STOCK, *OURS)
STEPS = 50
"""Denoising steps of a run; what a mode sends may change from step to step."""
ALL = "all"
CHART_FORMATS = (".svg", ".png", ".pdf")
_COLOURS = ("#b8bec6", "#4f8a8b", "#8f6f9f", "#e0a458", "#c8553d")


def case_on(machine: Machine, nodes: int, workload: Workload, resolution: int, batch: int = 1) -> Case:
    """Return a model on all ranks of some nodes.

    Raises:
        ValueError: an argument is not valid.
    """
    check_count("--nodes", nodes)
    check_count("--batch", batch)
    check_count("--resolution", resolution, PIXELS_PER_TOKEN)
    return Case(workload, resolution, batch, STEPS, machine.topology(nodes), machine.over, machine.flops)


def sweep(
    clusters: str, nodes: str, models: str, resolutions: str, modes: str = ALL, batch: int = 1
) -> list[dict[str, Any]]:
    """Predict every combination of options as a command line has them, modes varying fastest.

    Args:
        clusters: names in :data:`machines.MACHINES`, separated by commas, or 'all'.
        nodes: numbers of nodes, separated by commas.
        models: names in :data:`workloads.WORKLOADS`, or 'all'.
        resolutions: pixels on a side, separated by commas.
        modes: names in :data:`MODES`, or 'all'; each by its fastest split, against stock's fastest.
        batch: pictures.

    Returns:
        The rows of a `simulate` record.

    Raises:
        ValueError: an option is not valid.
    """
    wanted, rows = _names("--mode", modes, MODES), []
    for cluster in _names("--cluster", clusters, MACHINES):
        for model in _names("--model", models, WORKLOADS):
            for count in _counts("--nodes", nodes):
                for resolution in _counts("--resolution", resolutions):
                    case = case_on(MACHINES[cluster], count, WORKLOADS[model], resolution, batch)
                    known = {"cluster": cluster, "nodes": count, "model": model, "resolution": resolution}
                    rows += [{**known, "batch": batch, **row} for row in _of_modes(case, wanted)]
    return rows


def _of_modes(case: Case, modes: Sequence[str]) -> Iterable[dict[str, Any]]:
    stock = predictions(case, STOCK)[0]
    for mode in modes:
        found = stock if mode == STOCK else predictions(case, mode)[0]
        assert stock.step_seconds and found.step_seconds and found.compute_seconds  # machines on paper have a speed
        yield {
            "degree": found.ulysses,
            "ring_degree": found.ring,
            "placement": found.placement,
            "mode": mode,
            "share": stock.a2a_seconds / stock.step_seconds,
            "step_seconds": found.step_seconds,
            "speedup": stock.step_seconds / found.step_seconds,
            "compute_seconds": found.compute_seconds,
            "a2a_seconds": found.a2a_seconds,
            "ring_seconds": found.ring_seconds,
            "problem": case.shard.problem,
        }


def _names(option: str, text: str, valid: Iterable[str]) -> list[str]:
    names = list(valid) if text == ALL else [name.strip() for name in text.split(",")]
    for name in names:
        check_name(option, name, valid)
    return names


def _counts(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} {text!r} is not valid; it takes whole numbers separated by commas")
    return [int(part) for part in parts]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows of a record as a table."""
    from rich.console import Console
    from rich.table import Table

    table, left = Table(box=None), ("cluster", "model", "mode")
    columns = ("cluster", "nodes", "model", "px", "batch", "mode", "Ulysses x Ring", "share", "compute", "all-to-all")
    for column in (*columns, "ring", "step", "speedup"):
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            *(str(row[key]) for key in ("cluster", "nodes", "model", "resolution", "batch", "mode")),
            *(f"{row['degree']} x {row['ring_degree']}", percent(row["share"])),
            *(time(row[f"{part}_seconds"]) for part in ("compute", "a2a", "ring", "step")),
            f"{row['speedup']:.2f}",
        )
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    console.print(table, "predicted, not measured; speedup over stock's fastest split", sep="\n")
    for problem in dict.fromkeys(f"{row['model']}: {row['problem']}" for row in rows if row["problem"]):
        console.print(problem)


def check_chart(file: Path) -> None:
    """Check that a chart can be drawn into `file`.

    Raises:
        ValueError: its name ends in nothing that a chart can be written as, or matplotlib is missing.
    """
    if file.suffix.lower() not in CHART_FORMATS:
        raise ValueError(f"--plot {str(file)!r} is not valid; its name must end in {', '.join(CHART_FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--plot needs matplotlib: {INSTALL}")


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw speedups: a panel per cluster, model and resolution, a group of bars per number of nodes."""
    from matplotlib.figure import Figure

    panels: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        panels.setdefault((row["cluster"], row["model"], row["resolution"]), []).append(row)
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(1 + 2.8 * columns, 0.8 + 2.1 * lines), layout="constrained")
    for axes, (name, shown) in zip(figure.subplots(lines, columns, squeeze=False).flat, panels.items(), strict=False):
        nodes, modes = (list(dict.fromkeys(row[key] for row in shown)) for key in ("nodes", "mode"))
        width = 0.8 / len(modes)
        for number, mode in enumerate(modes):
            ours = [row for row in shown if row["mode"] == mode]
            places = [nodes.index(row["nodes"]) + (number - (len(modes) - 1) / 2) * width for row in ours]
            colour = _COLOURS[MODES.index(mode)]
            axes.bar(places, [row["speedup"] for row in ours], 0.9 * width, color=colour, label=mode)
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.set_xticks(range(len(nodes)), [f"{count} node{'s' if count > 1 else ''}" for count in nodes])
        axes.set_title(f"{name[0]}, {name[1]}, {name[2]} px", fontsize=8)
        axes.set_ylabel("speedup over stock")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
