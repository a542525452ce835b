"""Reads all records of `cocodiff bench cluster` in a folder as one."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from xfuser_cocodiff.lab.cluster_bench import benchmark, cell_rows
from xfuser_cocodiff.lab.cluster_bench.quality_record import QualityRecord
from xfuser_cocodiff.lab.reporting import record_file
from xfuser_cocodiff.lab.simulation.machines import MACHINES

_CELL = ("machine", "nodes", "model", "resolution", "batch", "text_tokens", "launch_us", "predicted")
"""Fields that tell cells of a folder apart."""


def read_folder(folder: Path, quality: QualityRecord) -> list[dict[str, Any]]:
    """Return the cells of all files `cluster-*.json` of a folder, with their PSNR; the newest record of a cell counts.

    Args:
        folder: with files that `cocodiff bench cluster --json` wrote.
        quality: PSNR of variants.

    Raises:
        ValueError: there is no such file, or one is no record of this benchmark.
    """
    files = sorted(folder.glob("cluster-*.json"))
    if not files:
        raise ValueError(f"{folder} has no cluster-*.json, which `cocodiff bench cluster --json` writes")
    files.sort(key=_created)
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for cell in (cell for file in files for cell in benchmark.read_cells(file)):
        key = tuple(cell[name] for name in _CELL)
        if cell["predicted"] and key in merged:
            known = {row["mode"] for row in cell["rows"]}
            cell["rows"] += [row for row in merged[key]["rows"] if row["mode"] not in known]
            cell_rows.set_speedups(cell["rows"])
        merged[key] = cell
    for cell in merged.values():
        benchmark.set_psnr(cell, quality)
    return list(merged.values())


def with_own_launch_time(cells: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cells whose kernel launches take the host time of their machine, and not that of `--launch_us`."""
    return [
        cell
        for cell in cells
        if math.isclose(cell["launch_us"], 1e6 * MACHINES[cell["machine"]].accelerator.launch_seconds)
    ]


def _created(file: Path) -> str:
    created: str = record_file.read(file).get("created", "")
    return created
