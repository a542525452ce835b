"""Draws the figures of a report: the amplified difference of two results, contact sheets, and step time charts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xfuser_cocodiff.tools.comparison.fidelity import read_image

MILLISECONDS = 1000
INK = "#7d7d7d"
"""Color of text and lines, readable on white and on black, since one chart serves both."""
REST_COLOR = "#b8bec6"
AXIS_COLORS = {"flat": "#8f6f9f", "node": "#c8553d", "gpu": "#e0a458", "tile": "#4f8a8b"}
_COMMUNICATION = "communication: "
"""Start of the label of an axis."""
_TEXT_COLORS = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
"""Settings of matplotlib for the colors of text and lines."""


def draw_difference(reference: Path, other: Path, out: Path) -> int | None:
    """Draw the absolute difference of two images, amplified by the largest whole factor that keeps it in range.

    Returns:
        The amplification factor. Nothing is drawn if it is 0 (equal images) or None (images of different sizes).
    """
    pixels, other_pixels = read_image(reference), read_image(other)
    if pixels.shape != other_pixels.shape:
        return None
    difference = np.abs(pixels.astype(np.int16) - other_pixels.astype(np.int16))
    largest = int(difference.max())
    if largest == 0:
        return 0
    from PIL import Image

    factor = 255 // largest
    Image.fromarray((difference * factor).astype(np.uint8)).save(out)
    return factor


def draw_contact_sheet(rows: Mapping[str, Sequence[np.ndarray]], out: Path) -> None:
    """Draw a contact sheet with one labeled row of images per name.

    Args:
        rows: by label, images of one size, equally many per row: uint8 (height, width, 3), or gray values in [0, 1].
        out: file in any format that matplotlib writes.
    """
    from matplotlib.figure import Figure

    first = next(iter(rows.values()))
    height, width = first[0].shape[:2]
    inches = min(1.2, 6.5 * height / width)
    size = 1.3 + len(first) * (inches * width / height + 0.05), len(rows) * (inches + 0.08)
    figure = Figure(figsize=size, layout="constrained")
    table = figure.subplots(len(rows), len(first), squeeze=False)
    for cells, (label, images) in zip(table, rows.items(), strict=True):
        cells[0].set_ylabel(label, rotation="horizontal", ha="right", va="center", fontsize=9, color=INK)
        for cell, image in zip(cells, images, strict=True):
            cell.imshow(image, cmap="gray", vmin=0, vmax=1)
            cell.set(xticks=[], yticks=[])
            cell.spines[:].set_visible(False)
    figure.savefig(out, dpi=150, bbox_inches="tight")


def draw_step_times(runs: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw one bar per run: communication by axis, the rest of the step, and the min-max range of the repeats.

    Args:
        runs: of a compare record.
        out: SVG file, for light and dark pages.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 8, **dict.fromkeys(_TEXT_COLORS, INK), "svg.hashsalt": "cocodiff"}):
        figure = Figure(figsize=(7.2, 1.1 + 0.45 * len(runs)), layout="constrained")
        axes = figure.subplots()
        for position, run in enumerate(runs):
            _draw_bar(axes, position, run)
        axes.set_yticks(range(len(runs)), [run["name"] for run in runs])
        axes.invert_yaxis()
        axes.set_xlabel("step time, ms")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
        handles, labels = axes.get_legend_handles_labels()
        entries = dict(
            sorted(zip(labels, handles, strict=True), key=lambda pair: not pair[0].startswith(_COMMUNICATION))
        )
        figure.legend(entries.values(), entries.keys(), loc="outside upper right", ncols=4, frameon=False)
        figure.savefig(out, transparent=True, metadata={"Date": None})


def _draw_bar(axes: Any, position: int, run: dict[str, Any]) -> None:
    """Draw the bar of one run; communication that overlaps with computation may fill all of it."""
    median, low, high = (MILLISECONDS * run["step_seconds_spread"][key] for key in ("median", "min", "max"))
    left = 0.0
    for axis, seconds in (run["a2a_seconds_by_axis"] or {}).items():
        width = min(MILLISECONDS * seconds, median - left)
        axes.barh(position, width, 0.6, left, color=AXIS_COLORS.get(axis, INK), label=f"{_COMMUNICATION}{axis}")
        left += width
    # The rest of a step is the whole step if communication was not measured.
    rest = "step" if run["a2a_seconds_by_axis"] is None else "everything else"
    axes.barh(position, median - left, 0.6, left, color=REST_COLOR, label=rest)
    axes.errorbar(median, position, xerr=[[median - low], [high - median]], color=INK, capsize=4, linewidth=1.2)
