"""`cocodiff env`: shows what this machine has, and what is missing, for the plugin."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import positive, write_json


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subparsers.add_parser(
        "env",
        help="what does this machine have, and what is missing?",
        description="Shows versions, topology, device, kernels and collectives, and what is missing. It runs kernels "
        "on the first device. The record also has the state of all patches.",
    )
    parser.add_argument(
        "--ranks", type=positive, help="number of ranks to detect the topology of (default: the launcher's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to this file")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    from xfuser_cocodiff.tools.reporting import environment, record_header

    description = environment.describe(options.ranks)
    facts = _facts(description, environment.REQUIRED)
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:{width}}", value, sep="\n" if "\n" in value else "  ")
    write_json(options, {**record_header.header(), **description})
    return 0 if description["plugin"] == "installed" else 1


def _facts(environment: dict[str, Any], required: Sequence[str]) -> dict[str, str]:
    """Return what is printed, by name."""
    local, versions = environment["ranks_per_node"], environment["versions"]
    detected = f"Ulysses degree {environment['degree']}, {'no launcher' if local is None else f'{local} ranks a node'}"
    return {
        **{name: version or "missing" for name, version in versions.items() if version or name in required},
        "plugin": environment["plugin"],
        "topology": f"{environment['topology']} (for {detected})",
        "tuning cache": f"{environment['cache']}: {', '.join(environment['kept']) or 'empty'}",
        **environment["device"],
    }
