"""Provides the rows and the table of `cocodiff simulate`: predicted steps of full-size models on known clusters."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from xfuser_cocodiff.engine.compression.mode_names import MODES as PLUGIN_MODES
from xfuser_cocodiff.lab.reporting.formatting import format_percent, format_seconds
from xfuser_cocodiff.lab.simulation import assumed_change, exchange
from xfuser_cocodiff.lab.simulation.machines import MACHINES, Machine
from xfuser_cocodiff.lab.simulation.plan_model import check_choice, check_count
from xfuser_cocodiff.lab.simulation.scenario import STOCK, Scenario
from xfuser_cocodiff.lab.simulation.step_time import rank_splits
from xfuser_cocodiff.lab.simulation.workloads import PIXELS_PER_TOKEN, WORKLOADS, Workload

MODES = (STOCK, *PLUGIN_MODES)
ALL = "all"


def scenario_on_nodes(machine: Machine, nodes: int, workload: Workload, resolution: int, batch: int = 1) -> Scenario:
    """Return the scenario of a model on all ranks of some nodes.

    Args:
        machine: cluster of the nodes.
        nodes: number of nodes.
        workload: model.
        resolution: pixels per side, or rows of a video.
        batch: number of images.

    Raises:
        ValueError: an argument is not valid.
    """
    check_count("--nodes", nodes)
    check_count("--batch", batch)
    check_count("--resolution", resolution, PIXELS_PER_TOKEN)
    link_profile, accelerator = machine.link_profile, machine.accelerator
    return Scenario(
        workload, resolution, batch, assumed_change.STEPS, machine.topology(nodes), link_profile, accelerator
    )


def sweep(
    clusters: str, nodes: str, models: str, resolutions: str, modes: str = ALL, batch: int = 1
) -> list[dict[str, Any]]:
    """Predict a step for every combination of comma-separated options; modes vary fastest.

    Args:
        clusters: names in :data:`machines.MACHINES`, aliases, or 'all'.
        nodes: numbers of nodes.
        models: names in :data:`workloads.WORKLOADS`, or 'all'.
        resolutions: pixels per side, or rows of a video.
        modes: names in :data:`MODES`, or 'all'. Each mode uses its fastest split.
        batch: number of images.

    Returns:
        Rows of a `simulate` record, with the speedup over stock's fastest split.

    Raises:
        ValueError: an option is not valid.
    """
    requested, rows = _parse_names("--mode", modes, MODES), []
    for cluster in _parse_names("--cluster", clusters, MACHINES):
        for model in _parse_names("--model", models, WORKLOADS):
            for count in _parse_counts("--nodes", nodes):
                for resolution in _parse_counts("--resolution", resolutions):
                    scenario = scenario_on_nodes(MACHINES[cluster], count, WORKLOADS[model], resolution, batch)
                    labels = {"cluster": cluster, "nodes": count, "model": model, "resolution": resolution}
                    rows += [{**labels, "batch": batch, **row} for row in _mode_rows(scenario, requested)]
    return rows


def _mode_rows(scenario: Scenario, modes: Sequence[str]) -> Iterable[dict[str, Any]]:
    stock = rank_splits(scenario, STOCK)[0]
    for mode in modes:
        best = stock if mode == STOCK else rank_splits(scenario, mode)[0]
        assert stock.step_seconds and best.step_seconds  # the devices of clusters are known
        yield {
            "degree": best.ulysses,
            "ring_degree": best.ring,
            "placement": best.placement,
            "mode": mode,
            "exchange": best.exchange,
            "exchange_reason": best.exchange_reason,
            "share": stock.a2a_seconds / stock.step_seconds,
            "step_seconds": best.step_seconds,
            "speedup": stock.step_seconds / best.step_seconds,
            "compute_seconds": best.compute_seconds,
            "a2a_seconds": best.a2a_seconds,
            "ring_seconds": best.ring_seconds,
            "host_seconds": best.host_seconds,
            "problem": scenario.shard.problem,
        }


def _parse_names(option: str, text: str, valid: Iterable[str]) -> list[str]:
    names = list(valid) if text == ALL else [name.strip() for name in text.split(",")]
    for name in names:
        check_choice(option, name, [*valid])
    return names


def _parse_counts(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} {text!r} is not valid; it must be integers separated by commas")
    return [int(part) for part in parts]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows of a record as a table."""
    from rich.console import Console
    from rich.table import Table

    table, left_aligned = Table(box=None), ("cluster", "model", "mode", "gathers K, V")
    columns = ("cluster", "nodes", "model", "px", "batch", "mode", "Ulysses x Ring", "gathers K, V", "stock comm.")
    for column in (*columns, "compute", "Ulysses", "ring", "host", "step time", "speedup"):
        table.add_column(column, justify="left" if column in left_aligned else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            *(str(row[key]) for key in ("cluster", "nodes", "model", "resolution", "batch", "mode")),
            f"{row['degree']} x {row['ring_degree']}",
            *("+".join(exchange.gathered(row["exchange"])), format_percent(row["share"])),
            *(format_seconds(row[f"{part}_seconds"]) for part in ("compute", "a2a", "ring", "host", "step")),
            f"{row['speedup']:.2f}x",
        )
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    notes = (
        "predicted, not measured; speedup over stock's fastest split",
        "gathers K, V: axes along which K and V are gathered, and heads not resharded",
        "Ulysses: all-to-alls and gathers of K and V",
        "stock comm.: communication share of stock's step, all-to-alls only",
    )
    console.print(table, *notes, sep="\n")
    for problem in dict.fromkeys(f"{row['model']}: {row['problem']}" for row in rows if row["problem"]):
        console.print(problem)
