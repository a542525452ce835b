"""`cocodiff simulate`: predicted steps of models of real size on machines that are known on paper."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from xfuser_cocodiff.engine.settings.options import MODES as OURS
from xfuser_cocodiff.lab.reporting.formatting import format_percent, format_seconds
from xfuser_cocodiff.lab.simulation.machines import MACHINES, Machine
from xfuser_cocodiff.lab.simulation.plan_model import check_count, check_name
from xfuser_cocodiff.lab.simulation.step_time import STOCK, Case, predictions
from xfuser_cocodiff.lab.simulation.workloads import PIXELS_PER_TOKEN, WORKLOADS, Workload

MODES = (STOCK, *OURS)
STEPS = 50
"""Denoising steps of a run; what a mode sends may change from step to step."""
ALL = "all"


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
            *(f"{row['degree']} x {row['ring_degree']}", format_percent(row["share"])),
            *(format_seconds(row[f"{part}_seconds"]) for part in ("compute", "a2a", "ring", "step")),
            f"{row['speedup']:.2f}",
        )
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    console.print(table, "predicted, not measured; speedup over stock's fastest split", sep="\n")
    for problem in dict.fromkeys(f"{row['model']}: {row['problem']}" for row in rows if row["problem"]):
        console.print(problem)
