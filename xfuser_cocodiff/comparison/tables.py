"""`cocodiff tables`: the paper's tables from what the cells of a campaign left, beside what the paper has.

A cell is a folder with `status`, the exit status of its command, `result.json`, its record, and `log`. The file `cells`
of the campaign names all that there should be, so that none can be missing unseen.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from xfuser_cocodiff.machine.plan import Plan
from xfuser_cocodiff.machine.topology import Topology
from xfuser_cocodiff.reporting import host
from xfuser_cocodiff.simulation import paper

FINISHED, FAILED, MISSING = "finished", "failed", "missing"
SIZES = (6, 24, 48)
"""Of the paper's all-to-alls, in MB per rank."""
_NEAR = 0.1
"""Messages are rounded to what divides, and a MB of the command is 5 % more than one of the paper."""


@dataclass(frozen=True)
class Cell:
    """One measurement of a campaign."""

    name: str
    state: str
    """FINISHED, FAILED or MISSING."""
    status: int | None
    """Exit status; None where it has not ended."""
    record: dict[str, Any]
    """What it found; nothing where it did not finish."""

    @classmethod
    def read(cls, out: Path, name: str) -> "Cell":
        """Read what a cell left, which may be nothing."""
        try:
            status = int((out / name / "status").read_text())
        except (OSError, ValueError):
            return cls(name, MISSING, None, {})
        if status:
            return cls(name, FAILED, status, {})
        try:
            return cls(name, FINISHED, 0, json.loads((out / name / "result.json").read_text()))
        except (OSError, ValueError):  # it said that all was well, and left nothing
            return cls(name, FAILED, 0, {})

    @property
    def nodes(self) -> int:
        """On how many it ran."""
        return int(self.name.partition("/")[0].removeprefix("nodes-"))


def collect(out: Path) -> dict[str, Any]:
    """The record of a campaign.

    Args:
        out: its folder.

    Raises:
        ValueError: there is no campaign.
    """
    try:
        names = dict.fromkeys((out / "cells").read_text().split())
    except OSError as error:
        raise ValueError(f"{out} is no folder of a campaign: {error}") from None
    cells = [Cell.read(out, name) for name in names]
    finished = [cell for cell in cells if cell.record]
    on_nodes = [cell for cell in finished if cell.name.startswith("nodes-")]
    a2a = [row for cell in on_nodes if cell.name.endswith("/a2a") for row in _a2a(cell)]
    steps = [_step(cell) for cell in on_nodes if cell.name.count("/") == 2]
    return {
        **host.header(),
        "cells": [{"name": cell.name, "state": cell.state, "status": cell.status} for cell in cells],
        "probe": [_probe(cell) for cell in on_nodes if cell.name.endswith("/probe")],
        "a2a": a2a,
        "steps": steps,
        "quality": [row for cell in finished if cell.name.startswith("quality/") for row in _quality(cell)],
        "paper": _beside_the_paper(a2a, steps),
    }


def _probe(cell: Cell) -> dict[str, Any]:
    keys = ("topology", "topology_inferred", "slow_axes", "axes")
    overlap = cell.record["profile"]["overlap"]
    return {"nodes": cell.nodes, **{key: cell.record[key] for key in keys}, "overlap": overlap}


def _a2a(cell: Cell) -> Iterable[dict[str, Any]]:
    record = cell.record
    tapa = str(Plan.hierarchical(Topology.parse(record["topology"], record["profile"]["ranks"])))
    for size in dict.fromkeys(row["bytes_per_rank"] for row in record["rows"]):
        taken = {row["algorithm"]: median(row["seconds"]) for row in record["rows"] if row["bytes_per_rank"] == size}
        yield {
            "nodes": cell.nodes,
            "bytes_per_rank": size,
            "stock_seconds": taken["stock"],
            "tapa_seconds": taken.get(tapa),
            "auto_seconds": taken["auto"],
        }


def _step(cell: Cell) -> dict[str, Any]:
    stock, plugin = cell.record["runs"]
    seconds = {run["name"]: run["step_seconds_spread"]["median"] for run in (stock, plugin)}
    a2a = stock["a2a_seconds"]
    model, _, resolution = cell.name.split("/")[1].rpartition("-")
    return {
        "nodes": cell.nodes,
        "model": model,
        "resolution": int(resolution),
        "mode": cell.name.rpartition("/")[2],
        "degree": plugin["degree"],
        "topology": plugin["topology"],
        "repeats": len(plugin["step_seconds"]),
        "stock_step_seconds": seconds[stock["name"]],
        "step_seconds": seconds[plugin["name"]],
        "speedup": seconds[stock["name"]] / seconds[plugin["name"]],
        "stock_a2a_share": None if a2a is None else a2a / seconds[stock["name"]],
        "bytes_slow_fraction": plugin["codecs"] and plugin["codecs"]["bytes_slow_fraction"],
        "bit_equal": plugin["latents"]["bit_equal"],
        "psnr_db": plugin["image"]["psnr_db"],
        "ssim": plugin["image"]["ssim"],
    }


def _quality(cell: Cell) -> Iterable[dict[str, Any]]:
    model = cell.name.partition("/")[2]
    for row in cell.record["rows"]:
        known = {"model": model, "mode": row["mode"], "bytes_slow_fraction": row["bytes_slow_fraction"]}
        yield {**known, "mask": None, "psnr_db": row["psnr_db_mean"], "psnr_db_stock": None, "published": None}
        for mask, found in row["inpaint"].items():
            both = {key: found[key] for key in ("psnr_db", "psnr_db_stock")}
            yield {**known, "mask": mask, **both, "published": paper.INPAINTING.get((model, mask))}


def _beside_the_paper(a2a: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The paper's figures, those simulated, and those measured; None where nothing was that could tell."""
    measured = {**_measured_a2a(a2a), **_measured_steps(steps)}
    return [
        {
            "what": finding.what,
            "published": finding.published,
            "simulated": finding.simulated,
            "measured": measured[finding.what],
        }
        for finding in paper.validate()
        if finding.what in measured
    ]


def _measured_a2a(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """On one node, by the paper's words for them."""
    found: dict[str, float | None] = {}
    for size in SIZES:
        near = [
            row
            for row in rows
            if row["nodes"] == 1 and abs(row["bytes_per_rank"] / (size * paper.MEGABYTE) - 1) < _NEAR
        ]
        flat, tapa = ((near[0][key] if near else None) for key in ("stock_seconds", "tapa_seconds"))
        found[f"TAPA over oneCCL at {size} MB"] = flat / tapa if flat and tapa else None
        if size == SIZES[-1]:
            found[f"oneCCL's all-to-all, {size} MB on 12 ranks, ms"] = flat and flat / paper.MILLISECOND
            found[f"TAPA, {size} MB on 12 ranks, ms"] = tapa and tapa / paper.MILLISECOND
    return found


def _measured_steps(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Means over models and resolutions, by the paper's words; its TAPA is our mode exact, V-First included."""

    def gains(mode: str, wanted: Callable[[dict], bool] = lambda row: True) -> list[float]:
        return [row["speedup"] for row in rows if row["mode"] == mode and wanted(row)]

    def on(nodes: Iterable[int]) -> Callable[[dict], bool]:
        return lambda row: row["nodes"] in nodes

    one, several = on(paper.ONE_NODE), on(paper.SEVERAL_NODES)
    four, eight = (_mean(gains("paper", on((nodes,)))) for nodes in (4, 8))
    shares = [row["stock_a2a_share"] for row in rows if row["model"] == "Qwen-Image" and row["stock_a2a_share"]]
    peak = gains("paper", lambda row: (row["model"], row["nodes"], row["resolution"]) == ("SD3.5", 4, 2304))
    return {
        "TAPA, one node": _mean(gains("exact", one)),
        "TAPA, 24-96 ranks": _mean(gains("exact", several)),
        "CoCoDiff, one node": _mean(gains("paper", one)),
        "CoCoDiff, 24-96 ranks": _mean(gains("paper", several)),
        "CoCoDiff, mean": _mean(gains("paper")),
        "CoCoDiff, peak: SD3.5, 2304 px, 4 nodes": _mean(peak),
        "CoCoDiff on 8 nodes over 4": eight / four if eight and four else None,
        "all-to-all share of Qwen-Image, highest": max(shares, default=None),
        "all-to-all share of Qwen-Image, lowest": min(shares, default=None),
    }


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def write(record: dict[str, Any], out: Path) -> Path:
    """Write tables.json and tables.md into a campaign's folder, and return the latter."""
    (out / "tables.json").write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
    file = out / "tables.md"
    file.write_text(markdown(record))
    return file


def markdown(record: dict[str, Any]) -> str:
    """The tables, and first of all what is not in them."""
    unfinished = [cell for cell in record["cells"] if cell["state"] != FINISHED]
    done = f"{len(record['cells']) - len(unfinished)} of {len(record['cells'])} cells have finished."
    parts = [f"# A campaign\n\n{done}\n"]
    if unfinished:
        parts.append(_table("Not finished", unfinished, ("name", "state", "status")))
    parts.append(_table("Beside the paper", record["paper"], ("what", "published", "simulated", "measured")))
    for title, key in (("Links", "probe"), ("All-to-all", "a2a"), ("Steps", "steps"), ("Quality", "quality")):
        columns = [name for name in record[key][0] if name != "axes"] if record[key] else []
        parts.append(_table(title, record[key], columns))
    return "\n".join(parts)


def _table(title: str, rows: list[dict[str, Any]], columns: Iterable[str]) -> str:
    if not rows:
        return f"## {title}\n\nNothing was measured.\n"
    lines = [list(columns), ["---"] * len(list(columns)), *([_show(row[name]) for name in columns] for row in rows)]
    return f"## {title}\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(_show, value)) if isinstance(value, (list, tuple)) else str(value)
