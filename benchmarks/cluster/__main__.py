"""Predicted steps of full-size models on known clusters: python -m benchmarks.cluster --help"""

import argparse
import itertools
import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from benchmarks import command_line
from xfuser_cocodiff.cli.output import silence_libraries, write_json
from xfuser_cocodiff.tools.reporting.formatting import NOT_MEASURED


def main(argv: Sequence[str] | None = None) -> int:
    """Predict cells, and return the exit status: 1 if one could not be."""
    _silence_libraries()
    from benchmarks.cluster import variants
    from xfuser_cocodiff.tools.simulation.machines import MACHINES

    parser = command_line.new_parser(
        "cluster",
        "Records steps of full-size models, of stock xDiT and the plugin, on an emulated accelerator, and predicts how "
        "long they take on a known machine. Options take several values, of which all combinations are predicted. With "
        "--json, cells that the file already has are skipped.",
    )
    command_line.add_json(parser)
    positive = command_line.at_least(1)
    parser.add_argument("--machine", nargs="+", required=True, choices=MACHINES)
    parser.add_argument("--nodes", nargs="+", type=positive, default=[2], help="(%(default)s)")
    parser.add_argument("--model", nargs="+", required=True, help="such as FLUX.1-dev or flux1")
    parser.add_argument("--resolution", nargs="+", type=positive, required=True, help="pixels, or rows of a video")
    parser.add_argument("--batch", type=positive, default=1, help="number of images (%(default)s)")
    parser.add_argument(
        "--modes",
        nargs="+",
        default=[variants.DEFAULT],
        help=f"{variants.BEST_STOCK}, rules of other systems, modes MODE[/PLAN][@v_first=on|off][@head_groups=N], "
        f"{', '.join(variants.BEST_MODES)}, or default: all that apply (default); a PLAN has semicolons for its commas",
    )
    parser.add_argument("--layers", type=positive, default=2, help="recorded blocks of each kind (%(default)s)")
    return command_line.run(parser, _run, argv)


def _run(options: argparse.Namespace) -> int:
    from benchmarks.cluster import rows, variants
    from xfuser_cocodiff.tools.reporting import record_header

    cells = [(cell, variants.expand(cell, options.modes)) for cell in _cells(options)]
    for cell, names in cells:
        variants.parse(cell, names)  # before any cell is recorded
    file, failures = options.json, 0
    finished = json.loads(file.read_text())["cells"] if file and file.is_file() else []
    for cell, names in cells:
        if any(rows.describe(cell, names).items() <= each.items() for each in finished):
            continue
        try:
            finished.append(rows.predict_cell(cell, names, _report))
        except RuntimeError as error:
            _report(f"{cell}: {error}: {error.__cause__}")
            failures += 1
            continue
        _show(finished[-1], str(cell))
        write_json(options, {**record_header.header(), "cells": finished})
    return 1 if failures else 0


def _cells(options: argparse.Namespace) -> Any:
    """Return the cells of all combinations of the options; resolutions vary fastest.

    Raises:
        ValueError: an option is not valid.
    """
    from benchmarks.cluster.cell import Cell
    from xfuser_cocodiff.tools.simulation.machines import MACHINES
    from xfuser_cocodiff.tools.simulation.workloads import PIXELS_PER_TOKEN, find_workload

    machines = [MACHINES[name] for name in options.machine]
    for resolution in options.resolution:
        if resolution % PIXELS_PER_TOKEN:
            raise ValueError(f"--resolution {resolution} is not valid; valid are multiples of {PIXELS_PER_TOKEN}")
    models = [find_workload(name) for name in options.model]
    names, sizes = [each.name for each in models], (options.batch, options.layers)
    return [Cell(*each, *sizes) for each in itertools.product(machines, options.nodes, names, options.resolution)]


def _show(cell: dict[str, Any], title: str) -> None:
    """Print the rows of a cell, with the bytes along the slowest axis."""
    print(f"{title}: {'not predicted, ' + cell['problem'] if cell['problem'] else 'predicted'}")
    for row in cell["rows"]:
        name = row["mode"] if row["mode"] == row["variant"] else f"{row['mode']} = {row['variant']}"
        speedups = [f"{row[key]:.2f}x" if row[key] else NOT_MEASURED for key in ("speedup", "speedup_over_best_stock")]
        times = [f"{1e3 * each:9.1f} ms" for each in (row["step_seconds"][0], row["exposed_seconds"])]
        split, sent = row["split"], next(iter(row["bytes_per_link"].values()))  # axes are ordered, slowest first
        columns = f"{split['ulysses']:3}x{split['ring']:<3} {times[0]}, exposed {times[1]}"
        print(f"  {name:32} {columns}, {speedups[0]} over stock, {speedups[1]} over best stock, {sent / 1e6:.1f} MB")


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _silence_libraries() -> None:
    """Turn off the import messages of other libraries, and the plugin's notes on each session that is recorded."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("LOG_LEVEL", "error")  # xDiT's
    silence_libraries()
    logging.getLogger("xfuser_cocodiff").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)


if __name__ == "__main__":
    sys.exit(main())
