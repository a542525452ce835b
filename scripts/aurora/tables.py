"""What a campaign of run.sh measured (argument: its folder): tables.md, and on the console what has not finished.

A cell is a folder with `status`, the exit status of its command, and `result.json`, its record. The file `cells` names
all that there should be, so that none can be missing unseen. The exit status is 1 where one failed or is missing.
"""

import json
import sys
from pathlib import Path

COLUMNS = ("cell", "Ulysses degree", "stock s", "s", "speedup", "stock's communication share", "bytes", "PSNR, dB")


def read(folder: Path) -> tuple[str, dict]:
    """What became of a cell, and its record if it finished."""
    try:
        if status := int((folder / "status").read_text()):
            return f"failed, exit status {status}", {}
        return "finished", json.loads((folder / "result.json").read_text())
    except ValueError:
        return "failed", {}
    except OSError:  # cut off, or it said that all was well and left nothing
        return "failed" if (folder / "status").exists() else "missing", {}


def row(name: str, runs: list[dict]) -> list[str]:
    """A mode beside stock."""
    stock, ours = runs
    theirs, taken = (run["step_seconds_spread"]["median"] for run in runs)
    share = "-" if stock["a2a_seconds"] is None else f"{stock['a2a_seconds'] / theirs:.2f}"
    sent = "1" if ours["codecs"] is None else f"{ours['codecs']['bytes_slow_fraction']:.3f}"
    psnr = "equal" if ours["latents"]["bit_equal"] else f"{ours['image']['psnr_db'] or float('nan'):.1f}"
    return [name, str(ours["degree"]), f"{theirs:.4g}", f"{taken:.4g}", f"{theirs / taken:.2f}", share, sent, psnr]


def main(out: Path) -> int:
    """Write the table of steps; cells of other kinds have their tables in their logs."""
    cells = {name: read(out / name) for name in dict.fromkeys((out / "cells").read_text().split())}
    rows = [row(name, record["runs"]) for name, (_, record) in cells.items() if "runs" in record]
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    (out / "tables.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
    unfinished = {name: state for name, (state, _) in cells.items() if state != "finished"}
    for name, state in unfinished.items():
        print(f"{name}: {state}")
    print(f"{len(cells) - len(unfinished)} of {len(cells)} cells have finished; steps: {out / 'tables.md'}")
    return 1 if unfinished else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
