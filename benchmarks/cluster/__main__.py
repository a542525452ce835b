"""Predicted steps of full-size models on known clusters: python -m benchmarks.cluster --help"""

import argparse
import itertools
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from benchmarks import command_line
from xfuser_cocodiff.cli.output import positive, silence_libraries, write_json

RECORDED_BLOCKS = 2
"""Blocks of each kind that are recorded."""


def main(argv: Sequence[str] | None = None) -> int:
    """Predict cells, and return the exit status."""
    _silence_libraries()
    from benchmarks.cluster import variants
    from benchmarks.full_size.architectures import ARCHITECTURES
    from xfuser_cocodiff.tools.simulation.machines import MACHINES

    parser = command_line.new_parser(
        "cluster",
        "Records steps of full-size models, of stock xDiT and the plugin, on an emulated accelerator, and predicts how "
        "long they take on a known machine. Options take several values, of which all combinations are predicted.",
    )
    command_line.add_json(parser)
    parser.add_argument("--machine", nargs="+", required=True, choices=MACHINES)
    parser.add_argument("--nodes", nargs="+", type=positive, default=[2], help="(%(default)s)")
    parser.add_argument("--model", nargs="+", required=True, type=_model, choices=ARCHITECTURES, metavar="MODEL")
    parser.add_argument("--resolution", nargs="+", type=positive, required=True, help="pixels, or rows of a video")
    parser.add_argument("--batch", type=positive, default=1, help="number of images (%(default)s)")
    text = f"{', '.join(variants.NAMES)} (default: all modes that apply)"
    parser.add_argument("--modes", nargs="+", choices=variants.NAMES, default=["default"], metavar="NAME", help=text)
    return command_line.run(parser, _run, argv)


def _model(name: str) -> str:
    from xfuser_cocodiff.tools.simulation.workloads import find_workload

    try:
        return find_workload(name).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _run(options: argparse.Namespace) -> int:
    from benchmarks.cluster import rows
    from xfuser_cocodiff.tools.reporting import record_header

    finished = []
    for cell in _cells(options):
        finished.append(rows.predict_cell(cell, options.modes))
        _show(finished[-1], str(cell))
    write_json(options, {**record_header.header(), "cells": finished})
    return 0


def _cells(options: argparse.Namespace) -> Any:
    """Return the cells of all combinations of the options; resolutions vary fastest.

    Raises:
        ValueError: an option is not valid.
    """
    from benchmarks.cluster.cell import Cell
    from xfuser_cocodiff.tools.simulation.machines import MACHINES
    from xfuser_cocodiff.tools.simulation.workloads import PIXELS_PER_TOKEN

    machines = [MACHINES[name] for name in options.machine]
    for resolution in options.resolution:
        if resolution % PIXELS_PER_TOKEN:
            raise ValueError(f"--resolution {resolution} is not valid; valid are multiples of {PIXELS_PER_TOKEN}")
    combinations = itertools.product(machines, options.nodes, options.model, options.resolution)
    return [Cell(*each, options.batch, RECORDED_BLOCKS) for each in combinations]


def _show(cell: dict[str, Any], title: str) -> None:
    """Print the rows of a cell, with the bytes along the slowest axis."""
    print(f"{title}: {'not predicted, ' + cell['problem'] if cell['problem'] else 'predicted'}")
    for row in cell["rows"]:
        name = row["mode"] if row["mode"] == row["variant"] else f"{row['mode']} = {row['variant']}"
        times = [f"{1e3 * each:9.1f} ms" for each in (row["step_seconds"][0], row["exposed_seconds"])]
        sent = next(iter(row["bytes_per_link"].values()))  # axes are ordered, slowest first
        split = f"{row['split']['ulysses']}x{row['split']['ring']}"
        print(f"  {name:32} {split:5} {times[0]}, exposed {times[1]}, {sent / 1e6:.1f} MB")


def _silence_libraries() -> None:
    """Turn off the import messages of other libraries, and the plugin's notes on each session that is recorded."""
    os.environ.setdefault("LOG_LEVEL", "error")  # xDiT's
    silence_libraries()
    logging.getLogger("xfuser_cocodiff").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)


if __name__ == "__main__":
    sys.exit(main())
