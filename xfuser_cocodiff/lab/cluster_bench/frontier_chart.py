"""Draws speedup over best stock against PSNR: a picture per machine, a panel per number of nodes, with the frontier."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xfuser_cocodiff.lab.cluster_bench import label_placement
from xfuser_cocodiff.lab.cluster_bench.frontier_points import Panel, Point, frontier, panels
from xfuser_cocodiff.lab.cluster_bench.label_placement import Box
from xfuser_cocodiff.lab.cluster_bench.row_names import format_count, model_name
from xfuser_cocodiff.lab.comparison.charts import AXIS_COLORS, INK, REST_COLOR

_EDGE = 3.0
"""Distance of the lossless variants, at the right edge, from the largest PSNR in dB."""
_LABEL_FRACTION = 0.35
"""Fraction of a panel's width, on its right, for the labels of lossless variants."""
_MARGIN = 1.15
"""Factor between the largest speedup and the upper edge, and between the smallest and the lower one."""
_OWN_COLOR = AXIS_COLORS["node"]
_FONT_SIZE = 7.5
_DOTS_PER_INCH = 150
_GAP = 0.075
"""Distance of a label from its point, in inches."""
_LEADER_GAPS = 2.0
"""Distance of a label, in gaps, from which on a line leads to its point."""
_LINE_SAMPLES = 40
"""Rectangles along each part of the frontier that labels avoid."""


def draw(record: dict[str, Any], file: Path) -> list[Path]:
    """Draw one picture per machine, and return their files: `file`, or with the machine in its name if there are more.

    Args:
        record: of `cocodiff bench cluster`.
        file: in any format that matplotlib writes.
    """
    machines = list(dict.fromkeys(cell["machine"] for cell in record["cells"]))
    files = []
    for machine in machines:
        out = file if len(machines) == 1 else file.with_name(f"{file.stem}-{machine}{file.suffix}")
        found = panels([cell for cell in record["cells"] if cell["machine"] == machine])
        if drawn := [each for each in found if each.points]:
            draw_machine(drawn).savefig(out, dpi=_DOTS_PER_INCH)
            files.append(out)
    return files


def draw_machine(drawn: Sequence[Panel]) -> Any:
    """Return the figure of a machine's panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.4 * len(drawn) + 0.4), layout="constrained", dpi=_DOTS_PER_INCH)
    FigureCanvasAgg(figure)
    places = figure.subplots(len(drawn), 1, squeeze=False)[:, 0]
    for axes, panel in zip(places, drawn, strict=True):
        _draw_points(axes, panel)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=5, frameon=False, fontsize=_FONT_SIZE)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # labels are placed in pixels, so nothing may move any more
    for axes, panel in zip(places, drawn, strict=True):
        _label_points(axes, panel.points)
    return figure


def _draw_points(axes: Any, panel: Panel) -> None:
    """Draw all points of a panel and the line of its frontier."""
    from matplotlib.ticker import LogLocator, NullLocator

    every, edge = panel.points, _edge(panel.points)
    axes.axvline(edge, color=REST_COLOR, linewidth=1, linestyle=":", zorder=0)
    best = frontier(every)
    axes.plot([_x(each, edge) for each in best], [each.speedup for each in best], color=INK, linewidth=1, zorder=1)
    for each in every:
        color, marker = (_OWN_COLOR, "o") if each.is_own else (INK, "s")
        face = color if each.is_valid else "white"
        axes.plot(_x(each, edge), each.speedup, marker, color=color, markerfacecolor=face, markersize=6, zorder=2)
        if each in best:
            axes.plot(_x(each, edge), each.speedup, "o", color=INK, markerfacecolor="none", markersize=11, zorder=1)
    lowest = min((each.psnr_db for each in every if each.psnr_db is not None), default=edge - 5)
    width = (edge - lowest + 3) / (1 - _LABEL_FRACTION)
    axes.set_xlim(lowest - 3, lowest - 3 + width)
    axes.plot([lowest - 3, edge], [1, 1], color=REST_COLOR, linewidth=1, zorder=0)
    speedups = [1.0, *(each.speedup for each in every)]
    axes.set_yscale("log")
    axes.set_ylim(min(speedups) / _MARGIN, max(speedups) * _MARGIN)
    axes.yaxis.set_major_locator(LogLocator(subs=_subdivisions(max(speedups) / min(speedups))))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:.3g}x")
    ticks = [tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick < edge - 1]
    axes.set_xticks([*ticks, edge], [*(f"{tick:g}" for tick in ticks), "lossless"])
    axes.tick_params(labelsize=_FONT_SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("PSNR to lossless, dB", fontsize=_FONT_SIZE + 1)
    axes.set_ylabel("speedup over best stock", fontsize=_FONT_SIZE + 1)
    axes.set_title("\n".join(_title(panel)), loc="left", fontsize=_FONT_SIZE)


def _label_points(axes: Any, every: Sequence[Point]) -> None:
    """Label lossy points around them, and lossless ones in a column on their right."""
    edge, best = _edge(every), frontier(every)
    shown = axes.get_window_extent()
    gap = _GAP * axes.figure.dpi
    texts = {each.mode: _text(axes, each, each in best) for each in every}
    sizes = {mode: (text.get_window_extent().width, text.get_window_extent().height) for mode, text in texts.items()}
    pixels = {each.mode: tuple(axes.transData.transform((_x(each, edge), each.speedup))) for each in every}
    column = axes.transData.transform((edge, 1))[0]
    lossless = [each.mode for each in every if each.psnr_db is None]
    height = max(height for _, height in sizes.values()) * 1.15
    centers = label_placement.stack_labels(
        [pixels[mode][1] for mode in lossless], height, shown.y0 + height / 2, shown.y1 - height / 2
    )
    left = column + 2.2 * gap
    for mode, center in zip(lossless, centers, strict=True):
        box = Box(left, center - height / 2, left + sizes[mode][0], center + height / 2)
        _put(axes, texts[mode], box, pixels[mode], is_led=abs(center - pixels[mode][1]) > 0.3 * height)
    lossy = [each.mode for each in every if each.psnr_db is not None]
    area = Box(shown.x0, shown.y0, column - 0.5 * gap, shown.y1)
    points, extents = [pixels[mode] for mode in lossy], [sizes[mode] for mode in lossy]
    line = _along_frontier([pixels[each.mode] for each in best])
    boxes = label_placement.place_labels(points, extents, area, gap, line)
    for mode, place in zip(lossy, boxes, strict=True):
        if place is None:
            texts[mode].remove()
            continue
        x, y = pixels[mode]
        distance = max(place.left - x, x - place.right, place.bottom - y, y - place.top)
        _put(axes, texts[mode], place, pixels[mode], is_led=distance > _LEADER_GAPS * gap)


def _text(axes: Any, point: Point, is_best: bool) -> Any:
    weight = "bold" if is_best else "normal"
    return axes.text(0, 0, point.name, fontsize=_FONT_SIZE, fontweight=weight, va="center", ha="left", zorder=3)


def _put(axes: Any, text: Any, box: Box, point: tuple[float, float], is_led: bool) -> None:
    """Move a label to a rectangle of pixels, with a line from its point if that is far."""
    to_data = axes.transData.inverted().transform
    middle = (box.bottom + box.top) / 2
    text.set_position(to_data((box.left, middle)))
    if is_led:
        end = min(max(point[0], box.left), box.right), min(max(point[1], middle), middle)
        (x, y), (end_x, end_y) = to_data(point), to_data(end)
        axes.plot([x, end_x], [y, end_y], color=REST_COLOR, linewidth=0.6, zorder=0.5, scalex=False, scaley=False)


def _along_frontier(pixels: Sequence[tuple[float, float]]) -> list[Box]:
    """Return small rectangles along the line of the frontier."""
    boxes = []
    for (x, y), (next_x, next_y) in itertools.pairwise(pixels):
        for step in range(_LINE_SAMPLES + 1):
            fraction = step / _LINE_SAMPLES
            at_x, at_y = x + fraction * (next_x - x), y + fraction * (next_y - y)
            boxes.append(Box(at_x - 1, at_y - 1, at_x + 1, at_y + 1))
    return boxes


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D

    def entry(color: str, marker: str, face: str, label: str, size: float = 6) -> Any:
        return Line2D([], [], color=color, marker=marker, markerfacecolor=face, markersize=size, ls="", label=label)

    return [
        entry(_OWN_COLOR, "o", _OWN_COLOR, "CoCoDiff"),
        entry(INK, "s", INK, "stock and other systems"),
        entry(INK, "s", "white", "predicted or invalid"),
        entry(INK, "o", "none", "on the frontier", 11),
    ]


def _title(panel: Panel) -> list[str]:
    predicted = ", predicted" if panel.cells[0]["predicted"] else ""
    ranks = f"{format_count(panel.nodes, 'node')}, {panel.cells[0]['ranks']} ranks"
    mean = f"geometric mean of {len(panel.cells)} cells: " if len(panel.cells) > 1 else ""
    resolutions: dict[str, list[str]] = {}
    for cell in panel.cells:
        resolutions.setdefault(model_name(cell["model"]), []).append(str(cell["resolution"]))
    cells = "; ".join(f"{model} {', '.join(sizes)} px" for model, sizes in resolutions.items())
    lines = [f"{panel.machine}, {ranks}{predicted}", f"{mean}{cells}"]
    if panel.without_psnr:
        lines.append(f"PSNR not measured: {', '.join(panel.without_psnr)}")
    if panel.in_some_cells:
        lines.append(f"not in all cells: {', '.join(panel.in_some_cells)}")
    return lines


def _subdivisions(ratio: float) -> tuple[float, ...]:
    """Return the ticks of a decade, given the ratio of the largest to the smallest speedup."""
    if ratio > 4:
        return (1, 1.5, 2, 3, 5, 7)
    return (1, 1.2, 1.5, 2, 3, 5, 6, 7, 8, 9) if ratio > 1.6 else (1, 1.05, 1.1, 1.2, 1.3, 1.5, 7, 8, 9, 9.5)


def _edge(every: Sequence[Point]) -> float:
    return max((each.psnr_db for each in every if each.psnr_db is not None), default=40.0) + _EDGE


def _x(point: Point, edge: float) -> float:
    return edge if point.psnr_db is None else point.psnr_db
