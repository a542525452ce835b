"""The `cocodiff` command: one file a verb.
Input: a command line.
Public: `main`, whose answer is the exit status; records in the files that were asked for.

A subcommand is a module here: `add_parser` describes it, and `run`, which the parser names, imports what it needs.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence

from xfuser_cocodiff.cli import bench, compare, env, models, plan, probe, quality, simulate, tune

COMMANDS = (compare, env, models, probe, plan, bench, quality, tune, simulate)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status: what it says, or 2 for a bad command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    divide = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="cocodiff", description="Tools around CoCoDiff's plugin for xDiT.")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    options, unknown = parser.parse_known_args(argv[:divide])
    # What follows -- is xDiT's, and argparse's own treatment of it differs between Python versions.
    options.xdit_arguments = argv[divide + 1 :]
    options.command = shlex.join(["cocodiff", *argv])
    if unknown:
        options.parser.error(f"unknown arguments: {' '.join(unknown)}")
    return options.run(options)
