"""Shows the record of a soak test."""

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.soak.fault import KINDS


def succeeded(record: dict[str, Any]) -> bool:
    """Return whether nothing failed, hung or was left behind."""
    return not (record["failures"] or record["hangs"] or record["left_behind"])


def show(record: dict[str, Any], console: Console) -> None:
    """Print a record."""
    modes = ", ".join(f"{mode} {number}" for mode, number in sorted(record["by_mode"].items()))
    console.print(
        f"Seed {record['seed']}, {record['ranks']} ranks, {record['seconds']:.0f} s: {record['requests']} requests "
        f"equal fresh processes ({modes or 'none'}); {record['fresh_processes']} fresh processes; "
        f"{len(record['failures'])} failures, {record['hangs']} hangs, {len(record['left_behind'])} left behind"
    )
    if record["faults"]:
        console.print(_faults(record["faults"]))
    if any(record["resources"]):
        console.print(_resources(record["resources"]))
    for failure in record["failures"]:
        console.print(f"FAILED {failure['item']}\n  {failure['request']}\n  {failure['cause']}", markup=False)
    for left in record["left_behind"]:
        console.print(f"LEFT BEHIND by {left}", markup=False)


def _faults(faults: dict[str, dict[str, Any]]) -> Table:
    table = Table("fault", "runs", "as expected", "longest time to the error", "description", box=None)
    for name, of_kind in faults.items():
        seconds = f"{of_kind['longest_seconds']:.1f} s" if of_kind["longest_seconds"] else "-"
        table.add_row(name, str(of_kind["runs"]), str(of_kind["as_expected"]), seconds, KINDS[name].description)
    return table


def _resources(resources: list[dict[str, dict[str, float]]]) -> Table:
    table = Table("rank", "resource", "first", "last", "most", "per 100 requests", box=None)
    for rank, found in enumerate(resources):
        for name, values in found.items():
            unit = 2**20 if name.endswith("_bytes") else 1
            label = name.replace("_bytes", " MiB").replace("_", " ")
            shown = [f"{values[key] / unit:.1f}" for key in ("first", "last", "most")]
            table.add_row(str(rank), label, *shown, f"{100 * values['slope'] / unit:+.2f}")
    return table
