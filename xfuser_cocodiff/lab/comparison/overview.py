"""A comparison at one glance: a row for each side, and in a sentence what it comes to."""

import math
from collections.abc import Mapping
from typing import Any

from xfuser_cocodiff.engine.topology.topology import FLAT, Topology
from xfuser_cocodiff.lab.reporting.formatting import (
    NOT_MEASURED,
    format_bytes,
    format_db,
    format_median_range,
    sum_over_axes,
)

NODE = "node"
CHANCE = "no significant difference"
"""Said of the speed of two sides whose ranges of repeats overlap."""
SAME = "bit-identical"


def rows(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a row for each side, stock first, as cells by column heading.

    What a rank sends in a step is counted on links between nodes where ranks have several nodes, else on all links.
    """
    stock, *plugins = record["runs"]
    named = next((run["topology"] for run in plugins if run["topology"]), None)
    topology = Topology.parse(named, stock["degree"]) if named else Topology.flat(stock["degree"])
    has_nodes = any(axis.name == NODE and axis.size > 1 for axis in topology.axes)

    def sent_bytes(run: Mapping[str, Any]) -> int | None:
        if run["bytes"] is None or not has_nodes:
            return sum_over_axes(run["bytes"])
        return round(sum(count * between_nodes(stage, topology) for stage, count in run["bytes"].items()))

    return [
        {
            "": run["name"],
            "step time": format_median_range(run["step_seconds"]),
            "speedup": NOT_MEASURED if run is stock else speedup(run, stock),
            f"sent{' between nodes' * has_nodes}": format_bytes(sent_bytes(run)),
            "PSNR to stock": NOT_MEASURED if run is stock else _psnr(run),
            "result": NOT_MEASURED if run is stock else _result(run),
        }
        for run in record["runs"]
    ]


def _psnr(run: Mapping[str, Any]) -> str:
    return "equal" if run["latents"]["bit_equal"] else format_db(run["image"]["psnr_db"])


def _result(run: Mapping[str, Any]) -> str:
    if run["latents"]["bit_equal"]:
        return SAME
    return "approximated" if run["codecs"] is not None else "differs"


def sentence(record: Mapping[str, Any]) -> str:
    """Return the speedup and the fidelity of each side in one sentence."""
    stock, *plugins = record["runs"]
    return "; ".join(_said(run, stock) for run in plugins) + "."


def _said(run: Mapping[str, Any], stock: Mapping[str, Any]) -> str:
    said = speedup(run, stock)
    speed = f"{CHANCE} in speed" if said == CHANCE else f"speedup {said}"
    near = run["image"]["psnr_db"]
    what = SAME if run["latents"]["bit_equal"] else "differs" if near is None else f"PSNR {format_db(near)} to stock"
    return f"{run['name']} {speed}, {what}"


def speedup(run: Mapping[str, Any], stock: Mapping[str, Any]) -> str:
    """Return a side's speedup over stock, of the medians, and how far it can be believed."""
    ours, theirs = run["step_seconds_spread"], stock["step_seconds_spread"]
    if ours["min"] <= theirs["max"] and theirs["min"] <= ours["max"]:
        return CHANCE
    found = 1 / run["ratio_to_stock"]
    qualified = [*(["slower"] if found < 1 else []), *(["one repeat"] if len(run["step_seconds"]) == 1 else [])]
    return f"{found:.2f}x" + (f" ({', '.join(qualified)})" if qualified else "")


def between_nodes(stage: str, topology: Topology) -> float:
    """The share of the bytes of a stage, which go to each of its ranks alike, that goes to other nodes.

    Args:
        stage: as traffic is counted: an axis, several that are merged, or flat.
        topology: of all ranks.
    """
    named = stage.split("+")
    sizes = {axis.name: axis.size for axis in topology.axes if stage == FLAT or axis.name in named}
    ranks = math.prod(sizes.values())
    return 0.0 if ranks == 1 else (ranks - ranks // sizes.get(NODE, 1)) / (ranks - 1)


def table(record: Mapping[str, Any]) -> str:
    """A table for a terminal."""
    found = rows(record)
    lines = [[*found[0]], *([*row.values()] for row in found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [(line[0].ljust(widths[0]), *map(str.rjust, line[1:-1], widths[1:-1]), line[-1]) for line in lines]
    return "\n".join(map("   ".join, aligned))
