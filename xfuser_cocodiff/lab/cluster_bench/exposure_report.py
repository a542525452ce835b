"""Prints the table of `cocodiff bench cluster --exposure`."""

import sys
from collections.abc import Iterable

from xfuser_cocodiff.lab.cluster_bench.cell import Cell
from xfuser_cocodiff.lab.cluster_bench.exposure import MESSAGES, STEP, Exposure, VariantExposure
from xfuser_cocodiff.lab.reporting.formatting import NOT_MEASURED

_COLUMNS = (
    *("variant", "blocks", "computation", "host waits", "exposed"),
    *(f"hide {name}" for name in MESSAGES),
    *("busiest link", "host", "bound", "predicted", "of bound"),
)
_LEFT = ("variant", "blocks")


def show(cell: Cell, variants: Iterable[VariantExposure]) -> None:
    """Print the table of a cell."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=True)
    chosen = []
    for each in variants:
        name, split = each.variant.name, each.variant.split
        chosen += [f"{name}: {each.schedule}"] if each.schedule != STEP else []
        for index, row in enumerate(each.rows):
            table.add_row("" if index else f"{name}, {split.ulysses} x {split.ring}", *_cells(row))
    console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 220)
    batch = f", batch {cell.batch}" if cell.batch > 1 else ""
    title = f"{cell.machine.name} ({cell.topology}), {cell.model}, {cell.resolution} px{batch}: ms of a step, predicted"
    console.print(title, table, *chosen, "", sep="\n")


def show_legend() -> None:
    """Print what the columns mean."""
    print(
        "host waits, exposed: time in which the device waits for the host, and for communication",
        "hide: time saved if these messages took none, at the same schedule; the columns need not add up to exposed",
        "bound: the longest of computation, busiest link and host",
        sep="\n",
    )


def _cells(row: Exposure) -> list[str]:
    link = max(row.link_seconds, key=lambda axis: row.link_seconds[axis])
    return [
        row.blocks,
        *map(_ms, (row.kernel_seconds, row.host_wait_seconds, row.exposed_seconds)),
        *(_ms(row.savings.get(name)) for name in MESSAGES),
        f"{link} {_ms(row.link_seconds[link])}",
        *map(_ms, (row.host_seconds, row.bound_seconds, row.seconds)),
        f"{row.seconds / row.bound_seconds:.2f}x",
    ]


def _ms(seconds: float | None) -> str:
    return NOT_MEASURED if seconds is None else f"{round(1e3 * seconds, 1) + 0.0:.1f}"
