"""The command line that benchmarks have in common."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from xfuser_cocodiff.cli.output import fail


def new_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a benchmark, given its module."""
    return argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option for the file of the record."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to this file")


def run(
    parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace], int], argv: Sequence[str] | None = None
) -> int:
    """Parse a command line, do the work, and return its exit status: 2 if it raises ValueError."""
    argv = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(argv)
    options.command = shlex.join([*parser.prog.split(), *argv])
    try:
        return work(options)
    except ValueError as error:
        return fail(str(error))
