"""Prints the result of tuning as tables, with a warning if its quality is poor."""

from collections.abc import Mapping
from typing import Any

from xfuser_cocodiff.engine.compression.bit_allocation import LETTERS
from xfuser_cocodiff.lab.reporting.formatting import NOT_MEASURED
from xfuser_cocodiff.lab.tuning.tune import TUNED

POOR_PSNR_DB = 30
"""PSNR to exact results below which differences are visible."""


def show(record: Mapping[str, Any]) -> None:
    """Print the quality on held-out prompts, and the bits of each layer."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(_quality_table(record))
    console.print(_bits_table(record))


def _quality_table(record: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, title="held-out prompts and seeds; bytes on slow links over lossless ones")
    for column in ("", "bytes", "PSNR dB", "sd", "SSIM", "LPIPS"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in {TUNED: record["held_out"], **record["held_out"]["modes"]}.items():
        metrics = (row["psnr_db_mean"], 1), (row["psnr_db_sd"], 1), (row["ssim_mean"], 4), (row["lpips_mean"], 4)
        cells = (NOT_MEASURED if value is None else f"{value:.{digits}f}" for value, digits in metrics)
        table.add_row(name, f"{row['bytes_slow_fraction']:.3f}", *cells)
    return table


def _bits_table(record: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, title=f"bits per value, in phases that begin at {record['starts']} of a run")
    for column in ("layer", *LETTERS.upper()):
        table.add_column(column)
    for layer in record["layers"]:
        codecs: dict[str, list[str]] = {letter: [] for letter in LETTERS}
        for entry in record["schedule"]:
            if entry["layer"] == layer:
                codecs[entry["tensor"]].append(entry["codec"].removeprefix("bits="))
        table.add_row(layer, *(" ".join(codecs[letter]) for letter in LETTERS))
    return table


def quality_warning(record: Mapping[str, Any]) -> str | None:
    """Return a warning, with what to do, if the quality on held-out prompts is poor."""
    psnr_db = record["held_out"]["psnr_db_mean"]
    if psnr_db >= POOR_PSNR_DB:
        return None
    target = "--bytes {bytes:g}" if "bytes" in record["target"] else "--psnr {psnr_db:g}"
    return (
        f"warning: {psnr_db:.1f} dB on held-out prompts at {target.format(**record['target'])}: below "
        f"{POOR_PSNR_DB} dB results differ visibly from exact ones; allow more --bytes, ask for a --psnr, or tune runs "
        "of more --steps"
    )
