"""`cocodiff plan`: what the planner chooses, and how long it expects that to take."""

import argparse
import os
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli import on_ranks
from xfuser_cocodiff.cli.answer import fail, write_json


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "plan",
        help="the planner's choice for each message size, with predicted times",
        description="With --profile it runs anywhere; without, on every rank, under torchrun or "
        "scripts/emulated_cluster.sh, and probes the links first.",
    )
    on_ranks.add_arguments(parser)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="a file that `cocodiff probe --json` wrote")
    parser.add_argument("--sizes", default="4KB,16KB,64KB,256KB,1MB,4MB,16MB", help="bytes per rank (%(default)s)")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from xfuser_cocodiff.bench import forecast

    def predict(profile: Any) -> dict[str, Any]:
        return forecast.forecast(profile, on_ranks.sizes(options.sizes))

    if options.profile is None:
        return on_ranks.run(options, lambda group, topology: predict(_probe(group, topology)), forecast.show, None)
    from xfuser_cocodiff.profile import Profile

    try:
        record = predict(Profile.read(options.profile))
    except ValueError as error:
        return fail(str(error))
    if os.environ.get("RANK", "0") == "0":
        forecast.show(record)
        if options.json:
            write_json(options, record)
    return 0


def _probe(group: Any, topology: Any) -> Any:
    from xfuser_cocodiff import probe
    from xfuser_cocodiff.collectives import Mesh
    from xfuser_cocodiff.xdit.platform import compute_device

    return probe.measure(Mesh.over(group, topology, device=compute_device()), group, compute_device())
