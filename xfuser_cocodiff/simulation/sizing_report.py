"""Tells people what :mod:`sizing` has found."""

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from xfuser_cocodiff.codec.memory import GIB
from xfuser_cocodiff.reporting.words import percent, size, time


def show(record: dict[str, Any]) -> None:
    """Print a record."""
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    batch = f", batch {record['batch']}" if record["batch"] > 1 else ""
    console.print(
        f"{record['model']}, {record['resolution']} px{batch}, {record['steps']} steps, {record['degree']} ranks as "
        f"{record['topology']} of {record['machine']}; predicted, not measured"
    )
    console.print(*_divisibility(record), sep="\n")
    console.print("", *_stock(record["stock"]), sep="\n")
    what = "splits, the fastest first; bytes and times of one step on one rank:"
    console.print(what, _splits(record["splits"]), sep="\n")
    console.print("", "modes on the first of them:", _modes(record["modes"]), sep="\n")
    if not record["modes"][-1]["reference_bytes"]:
        console.print("No axis of its Ulysses groups is slow: everything travels exactly in every mode.")
    console.print("", f"flags{' for when that is mended' * bool(record['problem'])}: {record['flags']}", sep="\n")


def _divisibility(record: dict[str, Any]) -> list[str]:
    heads, degree, possible = record["heads"], record["degree"], record["ulysses_degrees"]
    allowed = f"{heads} heads: stock's Ulysses degree must divide them, as {', '.join(map(str, possible))} do"
    if possible[-1] < degree:
        allowed += "; for others the plugin adds heads of zeros"
    lying = {row["ulysses"] for row in record["splits"]}
    if crooked := [str(count) for count in possible if count not in lying]:
        allowed += f"; groups of {', '.join(crooked)} do not lie on the axes alike, and are left out"
    held = record["tokens_per_rank"]
    lines = [allowed, f"a rank has {held['image']} image tokens and {held['text']} text tokens", *record["remarks"]]
    return lines + ([f"but {record['problem']}"] if record["problem"] else [])


def _stock(row: dict[str, Any] | None) -> list[str]:
    if row is None or row["step_seconds"] is None:
        return []
    split = f"{row['ulysses']} x {row['ring']}"
    return [
        f"stock's fastest split is {split}: {time(row['step_seconds'])} a step, in which all-to-alls take "
        f"{time(row['a2a_seconds'])} ({percent(row['share'])}) and the ring {time(row['ring_seconds'])}"
    ]


def _splits(rows: Sequence[dict[str, Any]]) -> Table:
    found = Table(box=None)
    for column, left in (
        ("Ulysses", False), ("Ring", False), ("ring lies", True), ("Ulysses group", True), ("mode", True),
        ("all-to-all sends", True), ("ring sends", True), ("all-to-all", False), ("ring", False), ("step", False),
        ("speed-up", False),
    ):  # fmt: skip
        found.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        lies = row["placement"] if row["ring"] > 1 and row["ulysses"] > 1 else ""
        found.add_row(
            *(str(row["ulysses"]), str(row["ring"]), lies, row["topology"], row["mode"]),
            *(_bytes(row["sent_bytes"]), _bytes(row["ring_bytes"])),
            *(time(row["a2a_seconds"]), time(row["ring_seconds"]), *_step(row)),
        )
    return found


def _modes(rows: Sequence[dict[str, Any]]) -> Table:
    found = Table(box=None)
    for column in ("mode", "all-to-all sends", "references", "in 8 bits", "all-to-all", "step", "speed-up"):
        found.add_column(column, justify="left" if column in ("mode", "all-to-all sends") else "right", no_wrap=True)
    for row in rows:
        references = [f"{row[name] / GIB:.2f} GiB" for name in ("reference_bytes", "compact_reference_bytes")]
        sent = row["mode"], _bytes(row["sent_bytes"])
        found.add_row(*sent, *references, time(row["a2a_seconds"]), *_step(row))
    return found


def _bytes(sent: dict[str, float]) -> str:
    return ", ".join(f"{axis} {size(count)}" for axis, count in sent.items())


def _step(row: dict[str, Any]) -> tuple[str, str]:
    if row["step_seconds"] is None:
        return "", ""
    return time(row["step_seconds"]), "" if row["speedup"] is None else f"{row['speedup']:.2f}"
