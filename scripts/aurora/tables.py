"""Writes tables.md from the records of run.sh (argument: its output folder), and prints the cells that are incomplete.

A cell is a folder with `status`, the exit status of its command, and `result.json`, its record. The file `cells` lists
all cells, so that missing ones are reported. The exit status is 1 if a cell failed or is missing.
"""

import json
import sys
from pathlib import Path

COLUMNS = (
    *("cell", "Ulysses degree", "step time of stock, s", "step time, s", "speedup", "communication share of stock"),
    *("bytes over exact", "PSNR, dB"),
)


def read(folder: Path) -> tuple[str, dict]:
    """Return the state of a cell, and its record if it is complete."""
    try:
        if status := int((folder / "status").read_text()):
            return f"failed, exit status {status}", {}
        return "complete", json.loads((folder / "result.json").read_text())
    except ValueError:
        return "failed", {}
    except OSError:  # interrupted, or it succeeded without a record
        return "failed" if (folder / "status").exists() else "missing", {}


def row(name: str, stock: dict, plugin: dict) -> list[str]:
    """Return the row of a mode."""
    baseline, seconds = (run["step_seconds_spread"]["median"] for run in (stock, plugin))
    share = "-" if stock["a2a_seconds"] is None else f"{stock['a2a_seconds'] / baseline:.2f}"
    sent = "1" if plugin["codecs"] is None else f"{plugin['codecs']['bytes_slow_fraction']:.3f}"
    psnr = "equal" if plugin["latents"]["bit_equal"] else f"{plugin['image']['psnr_db'] or float('nan'):.1f}"
    speedup = f"{baseline / seconds:.2f}"
    return [name, str(plugin["degree"]), f"{baseline:.4g}", f"{seconds:.4g}", speedup, share, sent, psnr]


def main(out: Path) -> int:
    """Write the table of step times; the other cells have their tables in their logs."""
    cells = {name: read(out / name) for name in dict.fromkeys((out / "cells").read_text().split())}
    compared = {name: record["runs"] for name, (_, record) in cells.items() if "runs" in record}
    rows = [row(f"{name}/{run['name']}", runs[0], run) for name, runs in compared.items() for run in runs[1:]]
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    (out / "tables.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
    incomplete = {name: state for name, (state, _) in cells.items() if state != "complete"}
    for name, state in incomplete.items():
        print(f"{name}: {state}")
    print(f"{len(cells) - len(incomplete)} of {len(cells)} cells are complete; step times: {out / 'tables.md'}")
    return 1 if incomplete else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
