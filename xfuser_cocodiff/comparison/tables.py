"""`cocodiff tables`: what the cells of a campaign of scripts/aurora measured.

A cell is a folder with `status`, the exit status of its command, `result.json`, its record, and `log`. The file `cells`
of the campaign names all that there should be, so that none can be missing unseen.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from xfuser_cocodiff.reporting import host

FINISHED, FAILED, MISSING = "finished", "failed", "missing"
Row = dict[str, Any]


def collect(out: Path) -> Row:
    """Return the record of a campaign: its cells, and the rows of all-to-alls, steps and quality.

    Raises:
        ValueError: the folder has no campaign.
    """
    try:
        names = dict.fromkeys((out / "cells").read_text().split())
    except OSError as error:
        raise ValueError(f"{out} is no folder of a campaign: {error}") from None
    found: dict[str, list[Row]] = {"cells": [], "a2a": [], "steps": [], "quality": []}
    for name in names:
        state, status, record = _read(out / name)
        found["cells"].append({"name": name, "state": state, "status": status})
        nodes, model, mode = [*name.split("/"), ""][:3]
        if record is None or model == "probe":
            continue
        if nodes == "quality":
            found["quality"] += _quality(model, record)
        elif model == "a2a":
            found["a2a"] += _a2a(nodes, record)
        else:
            found["steps"].append(_step(nodes, model, mode, record))
    return {**host.header(), **found}


def _read(folder: Path) -> tuple[str, int | None, Row | None]:
    """State of a cell, its exit status, and its record if it finished."""
    try:
        status = int((folder / "status").read_text())
    except (OSError, ValueError):
        return MISSING, None, None
    try:
        return (FAILED, status, None) if status else (FINISHED, 0, json.loads((folder / "result.json").read_text()))
    except (OSError, ValueError):  # it said that all was well, and left nothing
        return FAILED, 0, None


def _a2a(nodes: str, record: Row) -> Iterator[Row]:
    for size in dict.fromkeys(row["bytes_per_rank"] for row in record["rows"]):
        taken = {row["algorithm"]: median(row["seconds"]) for row in record["rows"] if row["bytes_per_rank"] == size}
        best = min(taken.keys() - {"stock", "auto"}, key=lambda name: taken[name], default=None)
        known = {"stock_seconds": taken["stock"], "auto_seconds": taken["auto"]}
        yield {"on": nodes, "bytes_per_rank": size, **known, "best": best, "best_seconds": taken.get(best)}


def _step(nodes: str, model: str, mode: str, record: Row) -> Row:
    stock, ours = record["runs"]
    theirs, taken = (run["step_seconds_spread"]["median"] for run in (stock, ours))
    return {
        **{"on": nodes, "model": model, "mode": mode, "degree": ours["degree"], "topology": ours["topology"]},
        "repeats": len(ours["step_seconds"]),
        "stock_step_seconds": theirs,
        "step_seconds": taken,
        "speedup": theirs / taken,
        "stock_a2a_share": None if stock["a2a_seconds"] is None else stock["a2a_seconds"] / theirs,
        "bytes_slow_fraction": ours["codecs"] and ours["codecs"]["bytes_slow_fraction"],
        "bit_equal": ours["latents"]["bit_equal"],
        "psnr_db": ours["image"]["psnr_db"],
    }


def _quality(model: str, record: Row) -> Iterator[Row]:
    for row in record["rows"]:
        known = {"model": model, "mode": row["mode"], "bytes_slow_fraction": row["bytes_slow_fraction"]}
        masks = {f"{mask}_psnr_db": (of["psnr_db"], of["psnr_db_stock"]) for mask, of in row["inpaint"].items()}
        yield {**known, "psnr_db": row["psnr_db_mean"], **masks}


def markdown(record: Row) -> str:
    """Return the tables, and first of all what is not in them."""
    unfinished = [cell for cell in record["cells"] if cell["state"] != FINISHED]
    parts = [
        f"# A campaign\n\n{len(record['cells']) - len(unfinished)} of {len(record['cells'])} cells have finished.\n"
    ]
    tables = {"Not finished": unfinished, "All-to-all": record["a2a"], "Steps": record["steps"]}
    for title, rows in {**tables, "Quality": record["quality"]}.items():
        if rows:
            lines = [[*rows[0]], ["---"] * len(rows[0]), *([_show(value) for value in row.values()] for row in rows)]
            parts.append(f"## {title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines))
    return "\n".join(parts)


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else " / ".join(map(_show, value)) if isinstance(value, tuple) else str(value)
