"""What was found, as a table."""

from collections.abc import Mapping
from typing import Any

from xfuser_cocodiff.engine.compression.bit_allocation import LETTERS
from xfuser_cocodiff.lab.reporting.formatting import NOT_MEASURED
from xfuser_cocodiff.lab.tuning.tune import TUNED

POOR_DB = 30
"""PSNR to exact results below which a difference is plain to see."""


def show(record: Mapping[str, Any]) -> None:
    """Print the check on what was not tuned on, and the bits of each layer."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table(box=None, title="on prompts and seeds that it was not tuned on")
    for column in ("", "bytes", "dB", "sd", "SSIM", "LPIPS"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in _checked(record).items():
        figures = (row["psnr_db_mean"], 1), (row["psnr_db_sd"], 1), (row["ssim_mean"], 4), (row["lpips_mean"], 4)
        shown = (NOT_MEASURED if value is None else f"{value:.{digits}f}" for value, digits in figures)
        table.add_row(name, f"{row['bytes_slow_fraction']:.3f}", *shown)
    console.print(table)
    bits = Table(box=None, title=f"bits per value, in phases that begin at {record['starts']} of a run")
    for column in ("layer", *LETTERS.upper()):
        bits.add_column(column)
    for layer in record["layers"]:
        codecs: dict[str, list[str]] = {letter: [] for letter in LETTERS}
        for entry in record["schedule"]:
            if entry["layer"] == layer:
                codecs[entry["tensor"]].append(entry["codec"].removeprefix("bits="))
        bits.add_row(layer, *(" ".join(codecs[letter]) for letter in LETTERS))
    console.print(bits)


def caution(record: Mapping[str, Any]) -> str | None:
    """Return a warning where what was not tuned on looks poor, and what to do about it."""
    decibels = record["held_out"]["psnr_db_mean"]
    if decibels >= POOR_DB:
        return None
    target = "--bytes {bytes:g}" if "bytes" in record["target"] else "--psnr {psnr_db:g}"
    return (
        f"warning: {decibels:.1f} dB on held-out prompts at {target.format(**record['target'])}: below {POOR_DB} dB "
        "results differ visibly from exact ones; allow more --bytes, ask for a --psnr, or tune runs of more --steps"
    )


def _checked(record: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {TUNED: record["held_out"], **record["held_out"]["modes"]}
