"""Pictures of a comparison: the amplified difference of two results, and where the time of a step goes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xfuser_cocodiff.lab.comparison.fidelity import read_picture

MILLISECONDS = 1000
INK = "#7d7d7d"
"""Of text and lines: readable on white and on black, since one chart serves both."""
REST_COLOUR = "#b8bec6"
AXIS_COLOURS = {"flat": "#8f6f9f", "node": "#c8553d", "gpu": "#e0a458", "tile": "#4f8a8b"}
_TEXT = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
"""matplotlib's settings for the colours of text and lines."""


def draw_difference(reference: Path, other: Path, out: Path) -> int | None:
    """Save how two pictures differ, amplified by the largest whole factor that keeps it in range.

    Returns:
        The amplification. Nothing is drawn where there is none: 0 where the pictures are equal, None where their sizes
        differ.
    """
    ours, theirs = read_picture(reference), read_picture(other)
    if ours.shape != theirs.shape:
        return None
    difference = np.abs(ours.astype(np.int16) - theirs.astype(np.int16))
    largest = int(difference.max())
    if largest == 0:
        return 0
    from PIL import Image

    factor = 255 // largest
    Image.fromarray((difference * factor).astype(np.uint8)).save(out)
    return factor


def draw_sheet(rows: Mapping[str, Sequence[np.ndarray]], out: Path) -> None:
    """Save pictures as a contact sheet: a row of them beside each name.

    Args:
        rows: pictures of one size, as many for each name: bytes (height, width, 3), or grey values from 0 to 1.
        out: a file of any kind that matplotlib writes.
    """
    from matplotlib.figure import Figure

    first = next(iter(rows.values()))
    height, width = first[0].shape[:2]
    inches = min(1.2, 6.5 * height / width)
    size = 1.3 + len(first) * (inches * width / height + 0.05), len(rows) * (inches + 0.08)
    figure = Figure(figsize=size, layout="constrained")
    table = figure.subplots(len(rows), len(first), squeeze=False)
    for axes, (name, pictures) in zip(table, rows.items(), strict=True):
        axes[0].set_ylabel(name, rotation="horizontal", ha="right", va="center", fontsize=9, color=INK)
        for place, picture in zip(axes, pictures, strict=True):
            place.imshow(picture, cmap="gray", vmin=0, vmax=1)
            place.set(xticks=[], yticks=[])
            place.spines[:].set_visible(False)
    figure.savefig(out, dpi=150, bbox_inches="tight")


def draw_step(runs: Sequence[dict[str, Any]], out: Path) -> None:
    """Save a bar per run: seconds in all-to-alls per axis, and the rest, with the range of the repeats.

    Args:
        runs: of a compare record.
        out: an SVG file, which suits light and dark pages.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 8, **dict.fromkeys(_TEXT, INK), "svg.hashsalt": "cocodiff"}):
        figure = Figure(figsize=(7.2, 1.1 + 0.45 * len(runs)), layout="constrained")
        axes = figure.subplots()
        for position, run in enumerate(runs):
            _draw_bar(axes, position, run)
        axes.set_yticks(range(len(runs)), [run["name"] for run in runs])
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds per step")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
        figure.legend(handles=_legend(axes), loc="outside upper right", ncols=4, frameon=False)
        figure.savefig(out, transparent=True, metadata={"Date": None})


def _draw_bar(axes: Any, position: int, run: dict[str, Any]) -> None:
    step, low, high = (MILLISECONDS * run["step_seconds_spread"][key] for key in ("median", "min", "max"))
    left, exposed = 0.0, 1.0
    if run["a2a_seconds"]:  # what is hidden behind computation takes no time of its own
        exposed = 1 - (run["hidden_seconds"] or 0.0) / run["a2a_seconds"]
    for axis, seconds in (run["a2a_seconds_by_axis"] or {}).items():
        width = MILLISECONDS * seconds * exposed
        axes.barh(position, width, 0.6, left, color=AXIS_COLOURS.get(axis, INK), label=f"all-to-all: {axis}")
        left += width
    axes.barh(position, max(step - left, 0), 0.6, left, color=REST_COLOUR, label=rest_name(run))
    axes.errorbar(step, position, xerr=[[step - low], [high - step]], color=INK, capsize=4, linewidth=1.2)


def _legend(axes: Any) -> list[Any]:
    """One entry per colour, the rest last as in the bars."""
    entries = {handle.get_label(): handle for handle in axes.get_legend_handles_labels()[0]}
    return sorted(entries.values(), key=lambda handle: not handle.get_label().startswith("all-to-all"))


def rest_name(run: dict[str, Any]) -> str:
    """What the part of a step outside all-to-alls is to be called; all of it where they could not be timed."""
    return "step" if run["a2a_seconds_by_axis"] is None else "everything else"
