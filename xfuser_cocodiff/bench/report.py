"""Tells a comparison to people: report.html, which needs no other file, report.md, and a few lines for the console."""

import base64
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

from xfuser_cocodiff.bench import picture
from xfuser_cocodiff.options import EXACT

LIBRARIES = ("jinja2", "matplotlib", "skimage")
INSTALL = "pip install 'xfuser-cocodiff[report]'"
NOTHING = "-"
"""Stands for a figure that cannot be had."""
DIFFERENCE, STEP, LAYERS, ERRORS = "difference.png", "step.svg", "layers.svg", "errors.svg"
_MEDIA_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}


def missing_libraries() -> list[str]:
    """Libraries that a report needs and this installation lacks."""
    return [name for name in LIBRARIES if importlib.util.find_spec(name) is None]


def write(record: dict[str, Any], out: Path) -> Path:
    """Write report.json, report.md, report.html and their pictures into `out`, and return the HTML file."""
    import jinja2

    (out / "report.json").write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=jinja2.select_autoescape(),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "time": time, "size": size, "total": total, "decibels": decibels}
    stock, plugin = record["runs"]
    content = {
        "record": record,
        "stock": stock,
        "plugin": plugin,
        "verdict": verdict(record),
        "speed": speed(record),
        "notes": notes(record),
        "axes": axes(record),
        "factor": _draw(record, out),
        "embed": lambda path: embed(out / path),
    }
    for name in ("report.md", "report.html"):
        (out / name).write_text(environment.get_template(name).render(content))
    return out / "report.html"


def _draw(record: dict[str, Any], out: Path) -> int | None:
    """Draw the pictures and return the amplification of the difference."""
    picture.draw_step(record["runs"], out / STEP)
    if layers := record["runs"][1]["a2a_by_layer"]:
        picture.draw_layers(layers, out / LAYERS)
    if codecs := record["runs"][1]["codecs"]:
        picture.draw_errors(codecs["errors"], out / ERRORS)
    stock, plugin = (run["image"]["path"] for run in record["runs"])
    return picture.draw_difference(out / stock, out / plugin, out / DIFFERENCE) if stock and plugin else None


def embed(file: Path) -> str:
    """A picture as a data URL."""
    return f"data:{_MEDIA_TYPES[file.suffix]};base64,{base64.b64encode(file.read_bytes()).decode()}"


def passed(record: dict[str, Any]) -> bool:
    """Whether the plugin kept its promise: without codecs it is stock, bit for bit; with them it promises no such
    thing."""
    plugin = record["runs"][1]
    return plugin["latents"]["bit_equal"] or plugin["codecs"] is not None


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
        text += f"; the largest difference is {latents['max_abs']:.3g}, PSNR {decibels(latents['psnr_db'])}"
    text += "."
    if not stock["latents"]["repeatable"]:
        text += " But stock's own runs differ from each other too, so this says nothing about the plugin: fix the seed."
    elif plugin["codecs"] is None:
        text += " Nothing was approximated, so they should be equal: please report this as a bug, with this file."
    else:
        text += f" The mode {plugin['name']} is an approximation, so a difference is expected."
    return ("Not the same result", text)


def speed(record: dict[str, Any]) -> str:
    """In a sentence, what the plugin did to the time of a step."""
    stock, plugin = record["runs"]
    ours, theirs = plugin["step_seconds_spread"], stock["step_seconds_spread"]
    took = f"A step took {time(theirs['median'])} with stock xDiT and {time(ours['median'])} with the plugin"
    repeats = len(plugin["step_seconds"])
    if repeats == 1:
        return f"{took}. With one repeat there is no telling a difference from chance."
    took = f"{took} (medians of {repeats})"
    if ours["min"] <= theirs["max"] and theirs["min"] <= ours["max"]:
        return f"{took}. The ranges of the repeats overlap, so any difference may be chance."
    ratio = plugin["ratio_to_stock"]
    change = (
        f"{percent(1 - ratio)} less" if ratio < 1 else f"{percent(ratio - 1)} more, so here the plugin does not pay"
    )
    # Of all ways to deal 2n equal values to two sides, two set the sides apart.
    odds = math.comb(2 * repeats, repeats) // 2
    said = f"{took}: {change}. Chance alone would set the ranges of {repeats} repeats apart one time in {odds}"
    return said + (", and one launch differs from the next." if record.get("launches") == "one" else ".")


def notes(record: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the rest."""
    stock, plugin = record["runs"]
    found = []
    if plugin["degree"] == 1:
        found.append("--ulysses_degree is 1: there was nothing to move, and both sides ran the same code.")
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
    for layer, statuses in (plugin["layers"] or {}).items():
        found += [f"In {layer}, {status}." for status in statuses]
    if stock["image"]["path"] is None:
        found.append("The pipeline returned no picture.")
    return found


def axes(record: dict[str, Any]) -> list[str]:
    """Axes to tell apart, stock's flat one and the plugin's; none where there is but one, which the total covers."""
    found = dict.fromkeys(axis for run in record["runs"] for axis in run["bytes"] or {})
    return list(found) if len(found) > 1 else []


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def time(seconds: float | None) -> str:
    """A duration in a unit that suits it."""
    if seconds is None:
        return NOTHING
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def size(count: float | None) -> str:
    """A number of bytes in a decimal unit that suits it."""
    if count is None:
        return NOTHING
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if count >= 10**power:
            return f"{count / 10**power:.2f} {unit}"
    return f"{count:.0f} B"


def total(by_axis: dict[str, int] | None) -> int | None:
    """The sum over axes of a figure that may not be had."""
    return None if by_axis is None else sum(by_axis.values())


def percent(share: float) -> str:
    """A share as a percentage."""
    return f"{share * 100:.1f} %"


def decibels(value: float | None) -> str:
    """A PSNR; a dash where it is infinite or cannot be had."""
    return NOTHING if value is None else f"{value:.1f} dB"
