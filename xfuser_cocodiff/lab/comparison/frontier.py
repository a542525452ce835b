"""Bytes on slow links against PSNR, of a record of `cocodiff quality`, as a picture."""

from pathlib import Path
from typing import Any

from xfuser_cocodiff.lab.comparison.quality import BASELINES, EXCHANGES, MODES_IN


def draw(record: dict[str, Any], file: Path) -> None:
    """Plot PSNR by bytes: modes as stars, and the series of a sweep as points of one color each.

    Args:
        record: record of `cocodiff quality`.
        file: in any format that matplotlib writes.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    measured = [row for row in record["rows"] if row["psnr_db_mean"] is not None]
    for series in dict.fromkeys(row["series"] for row in measured):
        points = sorted(
            (row for row in measured if row["series"] == series), key=lambda row: row["bytes_slow_fraction"]
        )
        x, y = ([row[key] for row in points] for key in ("bytes_slow_fraction", "psnr_db_mean"))
        marker, width = ("*", 9) if series in MODES_IN else (".", 8) if points[0]["sweep"] else ("*", 15)
        exchanges = dict.fromkeys(EXCHANGES[tuple(row["exchanges"])] for row in points)
        label = series if series in BASELINES else f"{series} ({', '.join(exchanges)})"
        axes.plot(x, y, marker, markersize=width, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.tick_params(labelsize=8)
    axes.set_title(f"{record['model']}, {record['steps']} steps", fontsize=8)
    axes.set_xlabel("bytes on slow links over lossless ones of the same exchange", fontsize=8)
    axes.set_ylabel("PSNR to stock, dB", fontsize=8)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(file, dpi=150)
