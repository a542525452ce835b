"""`cocodiff bench cluster`: steps of full-size models on emulated clusters in slow motion."""

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import fail, write_json

INTERRUPTED_STATUS = 130
INCOMPLETE_STATUS = 1
"""Exit status if a cell could not be measured."""


def add_parser(subjects: Any) -> None:
    """Add the subject to the parser of `cocodiff bench`."""
    parser = subjects.add_parser(
        "cluster",
        help="steps of full-size models on known clusters in slow motion, against stock and other systems",
        description="Records steps of full-size models on an emulated accelerator, and runs them on an emulated "
        "cluster in slow motion: links at their real rate divided by a dilation D, computation as a wait of D times "
        "its duration. --machine, --nodes, --model and --resolution take lists such as 1,2. With --json, cells that "
        "the file already has are skipped. The machine should be idle.",
        epilog="Exit status: 1 if a cell could not be measured.",
    )
    parser.add_argument("--machine", required=True, help="aurora, dgx-h100, pcie, ethernet-25, ethernet-100 or arc-b60")
    parser.add_argument("--nodes", default="2", help="numbers of nodes (%(default)s)")
    parser.add_argument("--model", required=True, help="flux1, flux2, sd35, qwen-image, hunyuan or wan")
    parser.add_argument("--resolution", required=True, help="pixels per side of an image, or rows of a 16:9 video")
    parser.add_argument("--batch", type=int, default=1, help="number of images (%(default)s)")
    parser.add_argument(
        "--text_tokens", type=int, metavar="N", help="text tokens of the prompt (default: the pipeline's)"
    )
    parser.add_argument(
        "--modes",
        metavar="LIST",
        help="variants, separated by commas: best_stock, rules of other systems, modes as in `bench model --mode`, or "
        "default: all that apply (default)",
    )
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="blocks of each kind (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved runs of each step (%(default)s)")
    parser.add_argument("--dilation", type=float, metavar="D", help="dilation (default: by bytes and cores)")
    parser.add_argument(
        "--launch_us",
        type=float,
        metavar="US",
        help="host time of a kernel launch; 0 for CUDA graphs (default: that of the accelerator)",
    )
    parser.add_argument("--predict", action="store_true", help="record and predict steps, without an emulated cluster")
    parser.add_argument(
        "--exposure",
        action="store_true",
        help="predict exposed communication by kind of block and tensor, of lossless variants (default: stock,exact)",
    )
    parser.add_argument(
        "--quality", type=Path, nargs="+", default=[], metavar="FILE", help="PSNR: what `cocodiff quality --json` wrote"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot speedup by PSNR, one picture per machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to this file")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the subject and return its exit status."""
    from xfuser_cocodiff.lab.emulation import forked_ranks

    forked_ranks.prepare_environment()  # before torch is imported
    _silence_libraries()
    from xfuser_cocodiff.lab.cluster_bench import benchmark, frontier_chart, report
    from xfuser_cocodiff.lab.reporting import host
    from xfuser_cocodiff.lab.reporting.progress import ProgressReporter

    if options.exposure:
        return _expose(options)
    try:
        cells, conditions = _cells(options), _conditions(options)
        earlier = benchmark.read_cells(options.json)
        if not options.predict:
            benchmark.check_machine()
    except (ValueError, RuntimeError) as error:
        return fail(str(error))

    def keep(finished: list[dict[str, Any]]) -> None:
        write_json(options, {**host.header(), "cells": finished})

    progress = ProgressReporter(sys.stderr)
    try:
        finished, failures = benchmark.run_all(cells, conditions, progress, earlier, keep)
    except KeyboardInterrupt:
        hint = f"; the same command resumes from {options.json}" if options.json else ""
        print(f"cocodiff: interrupted{hint}", file=sys.stderr)
        return INTERRUPTED_STATUS
    progress.close()
    record = {**host.header(), "cells": finished}
    report.show(record)
    keep(finished)
    if options.plot:
        frontier_chart.draw(record, options.plot)
    for failure in failures:
        print(f"cocodiff: {failure}", file=sys.stderr)
    return INCOMPLETE_STATUS if failures else 0


def _expose(options: argparse.Namespace) -> int:
    """Print the exposed communication of lossless variants, and return the exit status."""
    from xfuser_cocodiff.lab.cluster_bench import exposure, exposure_report

    options.predict, options.modes = True, options.modes or exposure.DEFAULT_MODES
    try:
        if options.json or options.plot or options.quality:
            raise ValueError("--exposure prints a table; --json, --plot and --quality are not valid with it")
        cells = _cells(options)
        for each in cells:
            exposure.check_lossless(each)
    except ValueError as error:
        return fail(str(error))
    failures = []
    for each in cells:
        if each.problem:
            failures.append(f"{each.cell.model}, {each.cell.resolution} px: {each.problem}")
            continue
        try:
            exposure_report.show(each.cell, exposure.expose(each))
        except RuntimeError as error:
            failures.append(str(error))
    exposure_report.show_legend()
    for failure in failures:
        print(f"cocodiff: {failure}", file=sys.stderr)
    return INCOMPLETE_STATUS if failures else 0


def _cells(options: argparse.Namespace) -> Any:
    """Return the cells that the options ask for.

    Raises:
        ValueError: an option is not valid.
    """
    from xfuser_cocodiff.lab.cluster_bench import requested_cells

    lists = (options.machine, options.nodes, options.model, options.resolution)
    numbers = (options.batch, options.layers, options.launch_us, options.text_tokens)
    cells = requested_cells.parse_cells(*lists, *numbers)
    return requested_cells.request(cells, options.modes, options.predict, options.dilation)


def _conditions(options: argparse.Namespace) -> Any:
    """Return how the options ask to measure.

    Raises:
        ValueError: an option is not valid.
    """
    from xfuser_cocodiff.lab.cluster_bench.benchmark import Conditions
    from xfuser_cocodiff.lab.cluster_bench.quality_record import QualityRecord

    if options.repeats < 1:
        raise ValueError(f"--repeats {options.repeats} is not valid; valid are numbers from 1")
    quality = QualityRecord.read_all(options.quality)
    return Conditions(options.dilation, options.repeats, options.predict, quality)


def _silence_libraries() -> None:
    """Turn off the import messages of other libraries, and the plugin's notes on each session that is recorded."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("LOG_LEVEL", "error")  # xDiT's
    for library in ("TRANSFORMERS", "DIFFUSERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    logging.getLogger("xfuser_cocodiff").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
