"""Tells a comparison to people: report.html, which needs no other file, and a few lines for the console."""

import base64
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xfuser_cocodiff.engine.settings.options import EXACT
from xfuser_cocodiff.lab.comparison import charts, overview
from xfuser_cocodiff.lab.comparison.fidelity import read_picture
from xfuser_cocodiff.lab.reporting.formatting import (
    NOT_MEASURED,
    format_bytes,
    format_db,
    format_percent,
    format_seconds,
    sum_over_axes,
)

LIBRARIES = ("jinja2", "matplotlib", "skimage")
STEP, PICTURES = "step.svg", "pictures.png"
_MEDIA_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}


def missing_libraries() -> list[str]:
    """Libraries that a report needs and this installation lacks."""
    return [name for name in LIBRARIES if importlib.util.find_spec(name) is None]


def pairs(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each side but stock, the record of a comparison of these two alone."""
    stock, *others = record["runs"]
    return [{**record, "runs": [stock, other]} for other in others]


def write(record: dict[str, Any], out: Path) -> Path:
    """Write report.json, report.html and their pictures into `out`, and return the HTML file.

    Args:
        record: of the comparison.
        out: folder, to which paths in the record are relative.
    """
    import jinja2

    (out / "report.json").write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=jinja2.select_autoescape(),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (format_bytes, format_db, format_percent, format_seconds, sum_over_axes)
    environment.filters |= {each.__name__: each for each in filters}
    rows = overview.rows(record)
    charts.draw_step(record["runs"], out / STEP)
    if shown := _shown(record["runs"], rows, out):
        charts.draw_sheet(shown, out / PICTURES)
    content = {
        "record": record,
        "sentence": overview.sentence(record),
        "rows": rows,
        "pairs": [_pair(pair, out) for pair in pairs(record)],
        "passed": passed(record),
        "embed": embed,
        "out": out,
        "step": out / STEP,
    }
    page = out / "report.html"
    page.write_text(environment.get_template(page.name).render(content))
    return page


def _shown(runs: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, str]], out: Path) -> dict[str, Any]:
    """Pictures of a comparison by what is said of them; none where a side has none, or one of another size."""
    if any(run["image"]["path"] is None for run in runs):
        return {}
    said = [row["result"] if row["PSNR to stock"] in ("equal", NOT_MEASURED) else row["PSNR to stock"] for row in rows]
    names = [
        run["name"] if each == NOT_MEASURED else f"{run['name']}\n{each}" for run, each in zip(runs, said, strict=True)
    ]
    shown = {name: [read_picture(out / run["image"]["path"])] for name, run in zip(names, runs, strict=True)}
    return shown if len({one.shape for [one] in shown.values()}) == 1 else {}


def _pair(record: dict[str, Any], out: Path) -> dict[str, Any]:
    """What a report says of one side beside stock, with its pictures drawn."""
    stock, plugin = record["runs"]
    file = out / f"difference-{plugin['name']}.png"
    ours, theirs = (run["image"]["path"] for run in (stock, plugin))
    factor = charts.draw_difference(out / ours, out / theirs, file) if ours and theirs else None
    return {
        **{"record": record, "stock": stock, "plugin": plugin, "difference": file, "factor": factor},
        "verdict": verdict(record),
        "notes": notes(record),
        "axes": axes(record),
    }


def embed(file: Path) -> str:
    """A picture as a data URL, so that a page needs no other file."""
    return f"data:{_MEDIA_TYPES[file.suffix]};base64,{base64.b64encode(file.read_bytes()).decode()}"


def passed(record: Mapping[str, Any]) -> bool:
    """Whether the plugin kept its promise on all sides: without codecs it is stock, bit for bit; with them it promises
    no such thing."""
    return all(side["latents"]["bit_equal"] or side["codecs"] is not None for side in record["runs"][1:])


def verdict(record: dict[str, Any]) -> tuple[str, str]:
    """In a few words, and in a sentence, whether the plugin computed what stock computed."""
    stock, plugin = record["runs"]
    latents, repeats = plugin["latents"], len(plugin["step_seconds"])
    if latents["bit_equal"]:
        runs = "the run" if repeats == 1 else f"each of {repeats} runs"
        return (
            "Same result, bit for bit",
            f"With the plugin, {runs} ended in exactly the numbers that stock xDiT ended in (the final latents, from "
            "which the picture is decoded), on every rank.",
        )
    places = latents["differs_at"]
    ranks, differing = {place["rank"] for place in places}, {place["repeat"] for place in places}
    text = (
        f"The final latents, from which the picture is decoded, differ from stock xDiT's in {len(differing)} of "
        f"{repeats} runs, on {_count(len(ranks), 'rank')}"
    )
    if latents["max_abs"] is not None:
        text += f"; the largest difference is {latents['max_abs']:.3g}, PSNR {format_db(latents['psnr_db'])}"
    text += "."
    if not stock["latents"]["repeatable"]:
        text += " But stock's own runs differ from each other too, so this says nothing about the plugin: fix the seed."
    elif plugin["codecs"] is None:
        text += " Nothing was approximated, so they should be equal: please report this as a bug, with this file."
    else:
        text += f" The mode {plugin['name']} is an approximation, so a difference is expected."
    return ("Not the same result", text)


def notes(record: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the rest."""
    stock, plugin = record["runs"]
    found = []
    if plugin["degree"] == 1:
        found.append("--ulysses_degree is 1: there was no all-to-all, and both sides ran the same code.")
    elif plugin["topology"] is None:
        found.append("The plugin left this run to stock xDiT (its log says why), so both sides ran the same code.")
    unseen = [run for run in (stock, plugin) if run["a2a_seconds"] is None]
    if unseen:
        sides = " and of ".join(run["name"] for run in unseen)
        compiled = any("use_torch_compile" in run["command"].replace("-", "_") for run in unseen)
        why = "they run inside compiled graphs" if compiled else "as in a compiled graph"
        found.append(
            f"Of {sides}, bytes and seconds of the all-to-alls, and what of them is hidden, could not be seen: {why}."
        )
    if plugin["name"] != EXACT and plugin["coded_reason"]:
        found.append(f"The mode {plugin['name']} coded nothing, or less than it could: {plugin['coded_reason']}.")
    if plugin["codecs"] and plugin["codecs"]["repeated"]:
        found.append(f"{plugin['codecs']['repeated']} exchanges had values that are not finite, and were sent exactly.")
    if stock["image"]["path"] is None:
        found.append("The pipeline returned no picture.")
    return found


def axes(record: dict[str, Any]) -> list[str]:
    """Axes to tell apart, stock's flat one and the plugin's; none where there is but one, which the total covers."""
    found = dict.fromkeys(axis for run in record["runs"] for axis in run["bytes"] or {})
    return list(found) if len(found) > 1 else []


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
