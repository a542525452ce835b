"""Runs a subcommand on every rank, under torchrun or on an emulated cluster."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import fail, silence_libraries, write_json
from xfuser_cocodiff.engine.topology.topology import NOTATION, Topology

Work = Callable[[Any, Topology], dict[str, Any]]
FAILED_RANK_STATUS = 1
"""Exit status of the remaining ranks if one has failed."""


def add_arguments(parser: argparse.ArgumentParser, default_topology: str) -> None:
    """Add the options that all of these subcommands have.

    Args:
        parser: of the subcommand.
        default_topology: the topology without --topology, in words.
    """
    parser.add_argument(
        "--topology",
        type=_topology,
        help=f"topology of all ranks: {NOTATION} (default: {default_topology})",
    )
    parser.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="timeout of a collective (default: PyTorch's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to this file")


def _topology(text: str) -> Topology:
    try:
        return Topology.parse(text, _world_size())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _seconds(text: str) -> float:
    from xfuser_cocodiff.xdit.settings import parsers

    try:
        return parsers.seconds(text)
    except ValueError:
        valid = f"valid are seconds above 0, up to {parsers.MAX_SECONDS:g}"
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; {valid}") from None


def run(options: argparse.Namespace, work: Work, show: Callable[[dict[str, Any]], None]) -> int:
    """Run work on this rank, which all ranks call, and print and write the record on rank 0.

    Args:
        options: of :func:`add_arguments`.
        work: returns the record, from the group of all ranks and their topology.
        show: prints a record.

    Returns:
        The exit status: 2 if an option is not valid, 1 if a rank has failed.
    """
    silence_libraries()
    import torch.distributed as dist

    from xfuser_cocodiff.engine.comm.failure_detection import UnresponsiveRankError
    from xfuser_cocodiff.tools.launching import rank_group
    from xfuser_cocodiff.xdit.platforms import platform

    try:
        topology = options.topology or platform.detect_topology(_world_size())
        group = rank_group.start(options.timeout)
        record = work(group, topology)
    except ValueError as error:
        return fail(str(error))
    except UnresponsiveRankError as error:  # on all remaining ranks; their tracebacks would hide the cause
        print(f"cocodiff: {error}", file=sys.stderr, flush=True)
        return FAILED_RANK_STATUS
    is_first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    if is_first:
        show(record)
        write_json(options, record)
    return 0
