"""`cocodiff simulate`: predicted steps on machines that are known on paper only."""

import argparse
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import fail, write_json


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "simulate",
        help="predicted steps on Aurora and other clusters",
        description="Predicts steps on machines that are known on paper only: each mode by its fastest split into "
        "Ulysses and Ring, against stock's fastest. Options take lists such as 1,2,4; those of names also take 'all'.",
    )
    parser.add_argument("--cluster", default="aurora", help="aurora, dgx-h100, pcie, ethernet (%(default)s)")
    parser.add_argument("--nodes", default="1,2,4,8", help="(%(default)s)")
    parser.add_argument(
        "--model", default="qwen-image", help="flux.1-dev, flux.2-dev, sd3.5-large, qwen-image (the default)"
    )
    parser.add_argument("--resolution", default="768,1536,2304", help="pixels on a side (%(default)s)")
    parser.add_argument("--mode", default="all", help="stock, exact, paper, balanced, fast (%(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="pictures (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record here")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from xfuser_cocodiff.lab.reporting import host
    from xfuser_cocodiff.lab.simulation import simulate

    try:
        lists = (options.cluster, options.nodes, options.model, options.resolution, options.mode)
        rows = simulate.sweep(*lists, options.batch)
    except ValueError as error:
        return fail(str(error))
    simulate.show(rows)
    write_json(options, {**host.header(), "rows": rows})
    return 0
