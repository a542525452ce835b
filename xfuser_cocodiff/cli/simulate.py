"""`cocodiff simulate`: predicts step times of full-size models on known clusters."""

import argparse
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import fail, write_json


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subparsers.add_parser(
        "simulate",
        help="predict step times of full-size models on known clusters",
        description="Predicts step times of full-size models on known clusters. Each mode uses its fastest split into "
        "Ulysses and Ring; speedups are over stock's fastest split. Options take lists such as 1,2,4; those that take "
        "names also take 'all'.",
    )
    parser.add_argument(
        "--cluster",
        default="aurora",
        help="clusters: aurora, dgx-h100, pcie, ethernet-25, ethernet-100, arc-b60 (%(default)s)",
    )
    parser.add_argument("--nodes", default="1,2,4,8", help="numbers of nodes (%(default)s)")
    parser.add_argument(
        "--model",
        default="qwen-image",
        help="models: flux.1-dev, flux.2-dev, sd3.5-large, qwen-image, hunyuanvideo, wan2.1-14b (%(default)s)",
    )
    parser.add_argument(
        "--resolution",
        default="768,1536,2304",
        help="pixels per side of an image, or rows of a 16:9 video (%(default)s)",
    )
    parser.add_argument("--mode", default="all", help="modes: stock, exact, paper, balanced, fast (%(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="number of images (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to this file")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
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
