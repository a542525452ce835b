"""Writes the report of a comparison: one self-contained HTML file, and the texts that the console shows too."""

import base64
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xfuser_cocodiff.engine.compression.default_mode import EXACT
from xfuser_cocodiff.tools.comparison import charts, report_table
from xfuser_cocodiff.tools.comparison.fidelity import read_image
from xfuser_cocodiff.tools.reporting.formatting import (
    NOT_MEASURED,
    format_bytes,
    format_db,
    format_percent,
    format_seconds,
    sum_over_axes,
)

LIBRARIES = ("jinja2", "matplotlib", "skimage")
STEP_CHART, IMAGES = "step.svg", "images.png"
_MEDIA_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}
_FILTERS = (format_bytes, format_db, format_percent, format_seconds, sum_over_axes, report_table.error_text)
"""Functions that the template uses, by their own names."""


def missing_libraries() -> list[str]:
    """Return the libraries that a report needs and this environment lacks."""
    return [name for name in LIBRARIES if importlib.util.find_spec(name) is None]


def split_by_variant(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one record per variant, each with stock and that variant only."""
    stock, *plugins = record["runs"]
    return [{**record, "runs": [stock, plugin]} for plugin in plugins]


def write(record: dict[str, Any], out: Path) -> Path:
    """Write report.json, report.html and their images.

    Args:
        record: of the comparison.
        out: folder to write to; paths in the record are relative to it.

    Returns:
        The HTML file.
    """
    import jinja2

    (out / "report.json").write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
    how = {"trim_blocks": True, "lstrip_blocks": True, "autoescape": True}
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, **how)
    environment.filters |= {function.__name__: function for function in _FILTERS}
    rows = report_table.table_rows(record)
    charts.draw_step_times(record["runs"], out / STEP_CHART)
    if images := _labeled_images(record["runs"], rows, out):
        charts.draw_contact_sheet(images, out / IMAGES)
    content = {
        "record": record,
        "sentence": report_table.sentence(record),
        "rows": rows,
        "pairs": [_variant_section(pair, out) for pair in split_by_variant(record)],
        "passed": passed(record),
        "embed": embed,
        "out": out,
        "step_chart": out / STEP_CHART,
    }
    page = out / "report.html"
    template = (Path(__file__).parent / page.name).read_text()
    page.write_text(environment.from_string(template).render(content))
    return page


def _labeled_images(
    runs: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, str]], out: Path
) -> dict[str, list[Any]]:
    """Return each variant's image by its label, or nothing if one is missing or sizes differ."""
    if any(run["image"]["path"] is None for run in runs):
        return {}
    labeled = {}
    for run, row in zip(runs, rows, strict=True):
        psnr = row["PSNR to stock"]
        quality = row["result"] if psnr in ("equal", NOT_MEASURED) else psnr
        label = run["name"] if quality == NOT_MEASURED else f"{run['name']}\n{quality}"
        labeled[label] = [read_image(out / run["image"]["path"])]
    return labeled if len({image.shape for [image] in labeled.values()}) == 1 else {}


def _variant_section(record: dict[str, Any], out: Path) -> dict[str, Any]:
    """Return the content of the report's section on one variant, and draw its difference to stock."""
    stock, plugin = record["runs"]
    file = out / f"difference-{plugin['name']}.png"
    reference, other = (run["image"]["path"] for run in (stock, plugin))
    factor = charts.draw_difference(out / reference, out / other, file) if reference and other else None
    return {
        **{"record": record, "stock": stock, "plugin": plugin, "difference": file, "factor": factor},
        "verdict": verdict(record),
        "notes": notes(record),
        "axes": axes_to_list(record),
    }


def embed(file: Path) -> str:
    """Return an image as a data URL, so that the page needs no other file."""
    return f"data:{_MEDIA_TYPES[file.suffix]};base64,{base64.b64encode(file.read_bytes()).decode()}"


def passed(record: Mapping[str, Any]) -> bool:
    """Return whether every variant without lossy compression is bit-identical to stock."""
    return all(run["latents"]["bit_equal"] or run["codecs"] is not None for run in record["runs"][1:])


def verdict(record: dict[str, Any]) -> tuple[str, str]:
    """Return a heading and a sentence that say whether the plugin's result is bit-identical to stock's."""
    stock, plugin = record["runs"]
    latents, repeats = plugin["latents"], len(plugin["step_seconds"])
    if latents["bit_equal"]:
        runs = "the run" if repeats == 1 else f"each of the {repeats} runs"
        return (
            "Bit-identical to stock",
            f"The final latents, from which the image is decoded, are bit-identical to those of stock xDiT in {runs} "
            "with the plugin, on every rank.",
        )
    places = latents["differs_at"]
    ranks, differing = {place["rank"] for place in places}, {place["repeat"] for place in places}
    text = (
        f"The final latents, from which the image is decoded, differ from those of stock xDiT in {len(differing)} of "
        f"{repeats} runs, on {len(ranks)} rank{'s' * (len(ranks) != 1)}"
    )
    if latents["max_abs"] is not None:
        text += f"; the largest difference is {latents['max_abs']:.3g}, PSNR {format_db(latents['psnr_db'])}"
    text += "."
    if not stock["latents"]["repeatable"]:
        text += " The runs of stock differ from each other too, so the comparison is inconclusive: fix the seed."
    elif plugin["codecs"] is None:
        text += " No compression was active, so they should be equal: please report this as a bug, with this file."
    else:
        text += f" This is expected: mode {plugin['name']} is lossy."
    return ("Not bit-identical to stock", text)


def notes(record: dict[str, Any]) -> list[str]:
    """Return remarks that limit what the comparison of one variant shows."""
    stock, plugin = record["runs"]
    remarks = []
    if plugin["degree"] == 1 == plugin["ring_degree"]:
        remarks.append("--ulysses_degree is 1: there is no communication, and both variants ran the same code.")
    elif plugin["topology"] is None:
        remarks.append("The plugin was inactive in this run (its log says why): both variants ran stock xDiT's code.")
    unmeasured = [run for run in (stock, plugin) if run["a2a_seconds"] is None]
    if unmeasured:
        names = " and ".join(run["name"] for run in unmeasured)
        compiled = any("use_torch_compile" in run["command"].replace("-", "_") for run in unmeasured)
        why = "it runs inside compiled graphs" if compiled else "it may run inside a compiled graph"
        remarks.append(f"Bytes and time of communication were not measured for {names}: {why}.")
    if plugin["name"] != EXACT and plugin["coded_reason"]:
        remarks.append(
            f"Mode {plugin['name']} compressed nothing, or only part of its messages: {plugin['coded_reason']}."
        )
    if plugin["codecs"] and plugin["codecs"]["repeated"]:
        remarks.append(f"{plugin['codecs']['repeated']} messages had values that are not finite and were sent exactly.")
    if stock["image"]["path"] is None:
        remarks.append("The pipeline returned no image.")
    return remarks


def axes_to_list(record: dict[str, Any]) -> list[str]:
    """Return the axes that get a row of their own in the table; none if there is only one."""
    axes = dict.fromkeys(axis for run in record["runs"] for axis in run["bytes"] or {})
    return list(axes) if len(axes) > 1 else []
