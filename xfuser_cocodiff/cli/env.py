"""`cocodiff env`: shows versions, platform, topology and patches on this machine."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import fail, write_json


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subparsers.add_parser(
        "env",
        help="show versions, platform, detected topology and the state of all patches",
        description="Shows versions, platform, detected topology, tuning cache and the state of all patches.",
    )
    parser.add_argument(
        "--degree", type=int, help="Ulysses degree to detect the topology for (default: the launcher's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to this file")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    from rich.console import Console
    from rich.table import Table

    from xfuser_cocodiff.lab.reporting import host
    from xfuser_cocodiff.xdit.integration import environment

    if options.degree is not None and options.degree < 1:
        return fail(f"--degree {options.degree} is not valid; valid are numbers from 1")
    description = environment.describe(options.degree)
    facts, patches = Table(show_header=False, box=None), Table(box=None)
    for column in ("patched symbol", "reason", "state"):
        patches.add_column(column, overflow="fold")
    for name, value in environment.facts(description):
        facts.add_row(name, value)
    for row in description.patches:
        patches.add_row(row.site, row.why, row.state)
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    console.print(facts, "", patches)
    write_json(options, {**host.header(), **dataclasses.asdict(description)})
    return 0 if description.plugin == "installed" else 1
