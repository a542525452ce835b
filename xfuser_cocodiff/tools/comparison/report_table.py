"""The table of a comparison, a row per variant, and one sentence with speedup and quality."""

import math
from collections.abc import Mapping
from typing import Any

from xfuser_cocodiff.engine.compression.step_report import RunErrors
from xfuser_cocodiff.engine.topology.topology import FLAT, Topology
from xfuser_cocodiff.tools.reporting.formatting import (
    NOT_MEASURED,
    format_bytes,
    format_db,
    format_median_range,
    sum_over_axes,
)

NODE = "node"
NO_SIGNIFICANT_DIFFERENCE = "no significant difference"
"""Speedup of two variants whose min-max ranges of step time overlap."""
BIT_IDENTICAL = "bit-identical"


def table_rows(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return one row per variant, stock first, each a mapping from column heading to cell.

    The bytes are what a rank sends in a step: over links between nodes if there are several nodes, else over all links.
    Also over all links where Ulysses degrees differ or are unknown, since a topology is that of one degree.
    """
    stock, *plugins = record["runs"]
    is_one_degree = all(run["degree"] == stock["degree"] for run in plugins)
    named = next((run["topology"] for run in plugins if run["topology"] and is_one_degree and run["degree"]), None)
    topology = Topology.parse(named, stock["degree"]) if named else Topology.flat(stock["degree"] or 1)
    has_nodes = any(axis.name == NODE and axis.size > 1 for axis in topology.axes)

    def sent_bytes(run: Mapping[str, Any]) -> int | None:
        if run["bytes"] is None or not has_nodes:
            return sum_over_axes(run["bytes"])
        return round(sum(count * inter_node_fraction(stage, topology) for stage, count in run["bytes"].items()))

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
        return BIT_IDENTICAL
    return "lossy" if run["codecs"] is not None else "differs"


def sentence(record: Mapping[str, Any]) -> str:
    """Return speedup and quality of every variant over stock in one sentence."""
    stock, *plugins = record["runs"]
    return "; ".join(_summarize(run, stock) for run in plugins) + "."


def error_text(run: Mapping[str, Any]) -> str:
    """Return the error of a lossy run by tensor, its bits, and what FP8 and FP4 lose of the same tensors."""
    return RunErrors(*(run[name] for name in RunErrors._fields)).text()


def _summarize(run: Mapping[str, Any], stock: Mapping[str, Any]) -> str:
    gain, psnr = speedup(run, stock), run["image"]["psnr_db"]
    speed = f"{gain} in step time" if gain == NO_SIGNIFICANT_DIFFERENCE else f"speedup {gain}"
    if run["latents"]["bit_equal"]:
        quality = BIT_IDENTICAL
    else:
        quality = "differs" if psnr is None else f"PSNR {format_db(psnr)} to stock"
    return f"{run['name']}: {speed}, {quality}"


def speedup(run: Mapping[str, Any], stock: Mapping[str, Any]) -> str:
    """Return the ratio of stock's median step time to a variant's, or that there is no significant difference."""
    ours, theirs = run["step_seconds_spread"], stock["step_seconds_spread"]
    if ours["min"] <= theirs["max"] and theirs["min"] <= ours["max"]:
        return NO_SIGNIFICANT_DIFFERENCE
    ratio = 1 / run["ratio_to_stock"]
    remarks = [*(["slower"] if ratio < 1 else []), *(["one repeat"] if len(run["step_seconds"]) == 1 else [])]
    return f"{ratio:.2f}x" + (f" ({', '.join(remarks)})" if remarks else "")


def inter_node_fraction(stage: str, topology: Topology) -> float:
    """Return the fraction of a stage's bytes that crosses between nodes.

    A stage is an all-to-all, which sends equally many bytes to each of its ranks.

    Args:
        stage: name under which its traffic is counted: an axis, several merged axes such as "gpu+node", or "flat".
        topology: of all ranks.
    """
    axes = stage.split("+")
    sizes = {axis.name: axis.size for axis in topology.axes if stage == FLAT or axis.name in axes}
    ranks = math.prod(sizes.values())
    return 0.0 if ranks == 1 else (ranks - ranks // sizes.get(NODE, 1)) / (ranks - 1)
