"""`cocodiff env`: shows what this machine has, and what is missing, for the plugin."""

import argparse
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import positive, write_json


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subparsers.add_parser(
        "env",
        help="show versions, detected topology, device, kernels and collectives",
        description="Shows versions, detected topology, tuning cache, device, kernels and collectives, and what is "
        "missing. It launches kernels on the first device. The record also has the state of all patches.",
    )
    parser.add_argument(
        "--ranks", type=positive, help="number of ranks to detect the topology for (default: the launcher's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to this file")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    from xfuser_cocodiff.tools.reporting import environment, record_header

    description = environment.describe(options.ranks)
    facts = environment.facts(description)
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:{width}}", value, sep="\n" if "\n" in value else "  ")
    write_json(options, {**record_header.header(), **description})
    return 0 if description["plugin"] == "installed" else 1
