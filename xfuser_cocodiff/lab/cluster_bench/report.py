"""Prints the tables of a record of `cocodiff bench cluster`."""

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from xfuser_cocodiff.engine.compression.mode_names import EXACT
from xfuser_cocodiff.lab.cluster_bench.variants import BEST_STOCK, STOCK
from xfuser_cocodiff.lab.reporting.formatting import (
    NOT_MEASURED,
    format_db,
    format_median_range,
    format_percent,
    format_seconds,
)

_COLUMNS = (
    *("variant", "U x R", "step time", "speedup", "over best stock", "exposed", "MB", "PSNR"),
    *("predicted", "valid"),
)


def show(record: dict[str, Any]) -> None:
    """Print one table per cell, and below it why times are not valid; then how far the simulator is off."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
    for cell in record["cells"]:
        console.print(_title(cell))
        if cell["problem"]:
            console.print(f"not measured: {cell['problem']}\n")
            continue
        remarks = (*_objections(cell["rows"]), *_missing_speedups(cell["rows"]), *_repeats(cell["rows"]))
        console.print(_table(cell["rows"]), *remarks, "", sep="\n")
    console.print(
        "step time: median (min to max) in undilated time; speedup: over stock's flat Ulysses",
        "exposed: step time without that of computation and host alone; MB: sent per rank and step on the slowest axis",
        "predicted: predicted over measured step time",
        *_simulator_range(record["cells"]),
        sep="\n",
    )


def _repeats(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line on runs that were repeated; nothing if none was, or in a record that does not know."""
    repeated = sum(row.get("repeated_runs") or 0 for row in rows)
    return [f"{repeated} runs were repeated: a collective had started late"] * bool(repeated)


def _title(cell: dict[str, Any]) -> str:
    batch = f", batch {cell['batch']}" if cell["batch"] > 1 else ""
    speed = "predicted, not measured"
    if dilations := [row["dilation"] for row in cell["rows"] if row["dilation"]]:
        speed = f"D = {' to '.join(f'{each:g}' for each in sorted({min(dilations), max(dilations)}))}"
    text = f", {cell['text_tokens']} text tokens" if cell["text_tokens"] else ""
    return (
        f"{cell['machine']} ({cell['topology']}), {cell['model']}, {cell['resolution']} px{batch}{text}: "
        f"{speed}, launches of {cell['launch_us']:g} us"
    )


def _table(rows: Sequence[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(box=None)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("variant", "valid") else "right", no_wrap=True)
    invalid_baselines = _invalid_baselines(rows)
    for row in rows:
        split, sent = row["split"], next(iter(row["bytes_per_link"].values()), 0.0)  # axes are ordered, slowest first
        is_measured = row["step_seconds"] is not None
        table.add_row(
            row["mode"] if row["mode"] == row["variant"] else f"{row['mode']} = {row['variant']}",
            f"{split['ulysses']} x {split['ring']}",
            format_median_range(row["step_seconds"] or [row["predicted_seconds"]]),
            NOT_MEASURED if STOCK in invalid_baselines else _times(row["speedup"]),
            NOT_MEASURED if BEST_STOCK in invalid_baselines else _times(row["speedup_over_best_stock"]),
            format_seconds(row["exposed_seconds"]),
            f"{sent / 1e6:.1f}",
            "lossless" if row["lossless"] else format_db(row["psnr_db"]),
            format_percent(row["prediction_ratio"]) if is_measured else NOT_MEASURED,
            {True: "yes", False: "INVALID", None: "predicted"}[row["valid"]],
        )
    return table


def _objections(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the reasons why times are not valid, each with its variants."""
    variants: dict[str, list[str]] = {}
    for row in rows:
        for reason in row["invalid_because"]:
            variants.setdefault(reason, []).append(row["mode"])
    return [f"INVALID: {', '.join(names)}: {reason}" for reason, names in variants.items()]


def _invalid_baselines(rows: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the baselines of speedups whose times are not valid, each with the reasons."""
    baselines = [row for row in rows if row["mode"] in (STOCK, BEST_STOCK)]
    return {row["mode"]: row["invalid_because"] for row in baselines if row["valid"] is False}


def _missing_speedups(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return why speedups are not printed."""
    names = {STOCK: "stock", BEST_STOCK: "best stock"}
    return [
        f"no speedup over {names[mode]}, which is INVALID ({'; '.join(reasons)})"
        for mode, reasons in _invalid_baselines(rows).items()
    ]


def _simulator_range(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return the range of simulated over measured step time; nothing if no row of flat stock or exact has both."""
    rows = [row for cell in cells for row in cell["rows"] if row["mode"] in (STOCK, EXACT) and row["valid"]]
    ratios = [
        row["simulated_seconds"] / median(row["step_seconds"]) for row in rows if row["simulated_seconds"] is not None
    ]
    if not ratios:
        return []
    return [
        f"simulator: {min(ratios):.2f} to {max(ratios):.2f} of the measured step time, in {len(ratios)} valid rows of "
        "stock and exact"
    ]


def _times(speedup: float | None) -> str:
    return NOT_MEASURED if speedup is None else f"{speedup:.2f}x"
