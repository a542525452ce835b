"""`cocodiff probe`: measures the links of a machine."""

import argparse
from typing import Any

from xfuser_cocodiff.cli import on_ranks


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subparsers.add_parser(
        "probe",
        help="how fast are my links?",
        description="Measures latency and bandwidth of all pairs and axes, and infers the topology. Run it on every "
        "rank, as under torchrun --no-python. --cocodiff_profile and `cocodiff plan` read what --json writes.",
    )
    on_ranks.add_arguments(parser, "inferred")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    from xfuser_cocodiff.tools.probing import link_survey

    def work(group: Any, topology: Any) -> dict[str, Any]:
        from xfuser_cocodiff.xdit.platforms.platform import compute_device

        return link_survey.measure(group, topology if options.topology else None, compute_device(), options.timeout)

    return on_ranks.run(options, work, show)


def show(record: dict[str, Any]) -> None:
    """Print the inferred topology and a table of its axes."""
    from xfuser_cocodiff.cli import tables

    table, console = tables.table(("axis", "ranks", "latency us", "MB/s per rank", ""), ("axis", "")), tables.console()
    for axis in record["axes"]:
        speed, slow = f"{axis['bytes_per_second'] / 1e6:.4g}", "slow" if axis["name"] in record["slow_axes"] else ""
        table.add_row(axis["name"], str(axis["size"]), f"{axis['latency_us']:.0f}", speed, slow)
    console.print(f"inferred topology: {record['topology_inferred']}", table)
    console.print(f"{record['seconds']:.1f} s, of which the link profile took {record['profile_seconds']:.1f} s")
