"""`cocodiff simulate`: predicted steps on machines that are known on paper only."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.answer import fail, write_json


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "simulate",
        help="predicted steps on Aurora and other clusters",
        description="Predicts steps on machines that are known on paper only. Options take lists such as 1,2,4; those "
        "of names also take 'all'.",
    )
    parser.add_argument("--cluster", default="aurora", help="aurora, dgx-h100, pcie, ethernet (%(default)s)")
    parser.add_argument("--nodes", default="1,2,4,8", help="(%(default)s)")
    parser.add_argument(
        "--model", default="qwen-image", help="flux.1-dev, flux.2-dev, sd3.5-large, qwen-image (the default)"
    )
    parser.add_argument("--resolution", default="768,1536,2304", help="pixels on a side (%(default)s)")
    parser.add_argument(
        "--mode", default="all", help="stock, tapa, tapa+vfirst, exact, exact+vfirst, paper (%(default)s)"
    )
    parser.add_argument("--batch", type=int, default=1, help="pictures (%(default)s)")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--validate", action="store_true", help="instead, published figures beside simulated ones")
    other.add_argument(
        "--bench", type=Path, nargs="+", metavar="FILE", help="instead, records of `bench model` beside simulated steps"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the speed-ups: .svg, .png or .pdf")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from rich.console import Console

    from xfuser_cocodiff.reporting import host
    from xfuser_cocodiff.simulation import paper, simulate, simulate_report

    if options.plot and (options.validate or options.bench):
        return fail(f"--plot draws predictions; it does not go with --{'bench' if options.bench else 'validate'}")
    record: dict[str, Any] = {"rows": []}
    try:
        if options.plot:  # before anything is computed
            simulate_report.check_chart(options.plot)
        if options.validate:
            findings = paper.validate()
            table, told = simulate_report.validation_table(findings), simulate_report.validation_record(findings)
            record["validation"] = told
        elif options.bench:
            cells = [cell for file in options.bench for cell in _held_against(file)]
            table, record["bench"] = simulate_report.bench_table(cells), simulate_report.bench_record(cells)
        else:
            lists = (options.cluster, options.nodes, options.model, options.resolution, options.mode)
            record["rows"] = simulate.sweep(*lists, options.batch)
            table = simulate_report.table(record["rows"])
    except ValueError as error:
        return fail(str(error))
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200).print(table)
    if options.plot:
        simulate_report.draw(record["rows"], options.plot)
    if options.json:
        write_json(options, {**host.header(), **record})
    return 0


def _held_against(file: Path) -> list[Any]:
    from xfuser_cocodiff.simulation import emulated

    try:
        return emulated.held_against(json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise ValueError(f"--bench {file}: {error}") from None
