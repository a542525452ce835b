"""Bytes on slow links against PSNR, of records of `cocodiff quality`: a picture with a panel per record, and tables."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xfuser_cocodiff.engine.topology import json_file
from xfuser_cocodiff.lab.comparison.quality import (
    BASELINES,
    COMPACTFUSION,
    EXCHANGES,
    FP4,
    FP8,
    INT8,
    METHODS,
    MODES_BY_HEADS,
    MODES_IN,
    ROW_FP8,
    SWEEPS,
)
from xfuser_cocodiff.lab.reporting.formatting import NOT_MEASURED

Record = dict[str, Any]
"""Record of `cocodiff quality`."""
_SYSTEMS = {
    FP8: "FP8, xDiT",
    ROW_FP8: "FP8 rows, cache-dit",
    INT8: "INT8/FP8, FlashInfer",
    FP4: "FP4, LightX2V",
    COMPACTFUSION: "CompactFusion",
}
"""Names of other systems in tables."""


def read_folder(folder: Path) -> list[Record]:
    """Return the records of sweeps in a folder, by model and guidance scale; those with more steps first.

    Raises:
        ValueError: there are none.
    """
    records = [json_file.read(file, json_file.MAX_RECORD_BYTES) for file in sorted(folder.glob("frontier-*.json"))]
    found = [record for record in records if {"model", "steps", "guidance_scale", "rows"} <= record.keys()]
    if not found:
        raise ValueError(f"{folder} has no frontier-*.json; `cocodiff bench all --only frontier --out DIR` writes them")
    return sorted(found, key=lambda record: (_title(record), -record["steps"]))


def by_title(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return records by model and guidance scale, in words."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(_title(record), []).append(record)
    return found


def _title(record: Record) -> str:
    scale = record["guidance_scale"]
    return record["model"] if scale is None else f"{record['model']}, guidance scale {scale:g}"


def table(records: Sequence[Record]) -> list[str]:
    """Return Markdown tables of bytes and PSNR: one per model and guidance scale, with a column per number of steps."""
    lines = []
    for title, of_model in by_title(records).items():
        steps = [f"{record['steps']} steps" for record in of_model]
        lines += ["", f"**{title}**, {_seeds(of_model)} seeds:", ""]
        lines += [f"| method | bytes | {' | '.join(steps)} |", f"|{'---|' * (2 + len(steps))}"]
        methods = [{_method(row): row for row in record["rows"] if _method(row)} for record in of_model]
        for name in dict.fromkeys(name for of_record in methods for name in of_record):
            rows = [of_record.get(name) for of_record in methods]
            lines.append(f"| {name} | {_bytes_range(rows)} | {' | '.join(map(_psnr, rows))} |")
    return lines[1:]


def _seeds(records: Sequence[Record]) -> str:
    return " or ".join(f"{seeds}" for seeds in sorted({record["seeds"] for record in records}))


def _method(row: dict[str, Any]) -> str | None:
    """Return the name of a row in tables; None for one that is in none."""
    series = row["series"]
    if not row["sweep"] or series == MODES_BY_HEADS:
        return f"`{row['mode']}`, {EXCHANGES[tuple(row['exchanges'])]}"
    if series not in SWEEPS[METHODS]:
        return None
    bits = re.search(r"\bbits=([\d.]+)", row["codec"])
    return f"{_SYSTEMS[series]}, bits={bits[1]}" if bits else _SYSTEMS[series]


def _bytes_range(rows: Sequence[dict[str, Any] | None]) -> str:
    """Return the bytes of a method over lossless ones, of all numbers of steps."""
    texts = [f"{row['bytes_slow_fraction']:.2f}" for row in rows if row]
    return texts[0] if len(set(texts)) == 1 else f"{min(texts)}-{max(texts)}"


def _psnr(row: dict[str, Any] | None) -> str:
    if row is None or row["psnr_db_mean"] is None:
        return "equal" if row and row["bit_equal"] else NOT_MEASURED
    spread = row["psnr_db_sd"]
    return f"{row['psnr_db_mean']:.1f}" + (f"±{spread:.1f}" if spread is not None else "")


def draw(records: Sequence[Record], file: Path) -> None:
    """Plot PSNR by bytes: modes as stars, and the series of a sweep as points of one color each.

    Args:
        records: of one run, or of several: a row of panels for each model and guidance scale, in which the panels have
            the numbers of steps.
        file: in any format that matplotlib writes.
    """
    from matplotlib.figure import Figure

    of_models = by_title(records)
    columns, is_single = max(map(len, of_models.values())), len(records) == 1
    size = (8, 5) if is_single else (2.6 * columns, 2 * len(of_models) + 1)
    figure = Figure(figsize=size, layout="constrained")
    all_series = dict.fromkeys(row["series"] for record in records for row in record["rows"])
    colors = {series: f"C{index}" for index, series in enumerate(all_series)}
    places = figure.subplots(len(of_models), columns, squeeze=False, sharex=True, sharey="row")
    for axes, (title, of_model) in zip(places, of_models.items(), strict=True):
        axes[0].set_ylabel(title.replace(", ", "\n"), fontsize=8)
        for place in axes[len(of_model) :]:
            place.set_axis_off()
        for place, record in zip(axes, of_model, strict=False):
            place.set_title(f"{record['steps']} steps", fontsize=8)
            rows = record["rows"] if is_single else [row for row in record["rows"] if _method(row)]
            _draw_panel(place, rows, colors, 1 if is_single else 0.6)
    handles = {
        label: handle for axes in places.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    title = "PSNR to stock in dB, by bytes on slow links over lossless ones of the same exchange"
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, fontsize=8, title=title)
    figure.savefig(file)


def _draw_panel(axes: Any, rows: Sequence[dict[str, Any]], colors: Mapping[str, str], size: float) -> None:
    """Draw the rows of a record.

    Args:
        axes: of matplotlib.
        rows: of the record.
        colors: by series.
        size: factor of the size of points.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    measured = [row for row in rows if row["psnr_db_mean"] is not None]
    for series in dict.fromkeys(row["series"] for row in measured):
        points = sorted(
            (row for row in measured if row["series"] == series), key=lambda row: row["bytes_slow_fraction"]
        )
        x, y = ([row[key] for row in points] for key in ("bytes_slow_fraction", "psnr_db_mean"))
        marker, width = ("*", 9) if series in MODES_IN else (".", 8) if points[0]["sweep"] else ("*", 15)
        exchanges = dict.fromkeys(EXCHANGES[tuple(row["exchanges"])] for row in points)
        label = series if series in BASELINES else f"{series} ({', '.join(exchanges)})"
        axes.plot(x, y, marker, markersize=width * size, label=label, color=colors[series])
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.tick_params(labelsize=8)
