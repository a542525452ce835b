"""The `cocodiff` command, with one module per subcommand.
Input: a command line.
Output: an exit status, tables on the console, and records in JSON files.
Public: `main`.

In the module of a subcommand, `add_parser` adds its parser. Its `run` imports the libraries that it needs, so that
--help stays fast.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from xfuser_cocodiff.cli import compare, demo, env, plan, probe, quality

COMMANDS = (compare, demo, env, probe, plan, quality)


class _Parser(argparse.ArgumentParser):
    """Parser that accepts dashes and underscores in the names of options, as xDiT's parsers do."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments with their options in the spelling that this parser has."""
        spellings = {_dashed(name): name for action in self._actions for name in action.option_strings}
        named = (argument.partition("=") for argument in args)
        return super().parse_known_args(
            ["".join([spellings.get(_dashed(name), name), *rest]) for name, *rest in named], namespace
        )


def _dashed(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status; 2 if the command line is not valid."""
    argv = list(sys.argv[1:] if argv is None else argv)
    separator = argv.index("--") if "--" in argv else len(argv)
    parser = _Parser(
        prog="cocodiff",
        description="Tells whether CoCoDiff makes xDiT faster on your machine, and what it does to your image.",
    )
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    options, unknown = parser.parse_known_args(argv[:separator])
    # Arguments after -- are xDiT's. They are split here, since argparse treats -- differently by Python version.
    options.xdit_arguments = argv[separator + 1 :]
    options.command = shlex.join(["cocodiff", *argv])
    if unknown:
        options.parser.error(f"unknown arguments: {' '.join(unknown)}")
    return options.run(options)
