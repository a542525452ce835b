"""The all-to-all alone by message size: stock's call, every plan, and the planner's choice."""

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import bare_runtime, command_line
from xfuser_cocodiff.cli import on_ranks
from xfuser_cocodiff.cli.output import positive
from xfuser_cocodiff.engine.attention.reshard import reshard
from xfuser_cocodiff.engine.autotune.timing import time_calls
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.topology import planner
from xfuser_cocodiff.engine.topology.plans import Plan, candidates
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.probing import link_survey
from xfuser_cocodiff.tools.reporting import record_header
from xfuser_cocodiff.xdit.platforms.platform import compute_device

_CALLS = 20
"""Calls in a row of a sample: ranks enter it after a barrier and leave it one by one."""
_HEAD_DIM = 8
_DTYPE = torch.bfloat16
_UNITS = {"KB": 2**10, "MB": 2**20, "": 1}


def measure(
    group: dist.ProcessGroup,
    topology: Topology,
    stock: Callable[[torch.Tensor], torch.Tensor],
    sizes: Sequence[int],
    repeats: int,
) -> dict[str, Any]:
    """Time the sequence-to-heads all-to-all of stock, of every plan and of the planner's choice.

    Args:
        group: all ranks.
        topology: their topology.
        stock: xDiT's own all-to-all of a tensor (B, H, S/P, D).
        sizes: bytes of that tensor on a rank, rounded to a divisible size.
        repeats: number of interleaved measurements of each.

    Returns:
        The record, the same on every rank.

    Raises:
        RuntimeError: the output of a plan differs from stock's.
    """
    device = compute_device()
    mesh = Mesh.over(group, topology, candidates(topology), device=device)
    profile = link_survey.measure_profile(mesh, device)
    rows = []
    for size in sizes:
        tensor = _tensor(size, topology, device)
        plans = {str(plan): plan for plan in candidates(topology)}
        plans["auto"] = planner.choose_plan(profile, tensor.nbytes)
        calls: dict[str, Callable] = {"stock": functools.partial(stock, tensor)}
        calls |= {name: _by_plan(tensor, mesh, plan) for name, plan in plans.items()}
        expected = calls["stock"]()
        for name in plans:
            if not torch.equal(expected, calls[name]()[0]):
                raise RuntimeError(f"the output of plan {name!r} differs from stock's, at {tensor.nbytes} bytes")
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _, (name, call) in itertools.product(range(repeats), calls.items()):  # all see the same conditions
            times[name] += time_calls(call, _CALLS, 1, group, device, is_warm=True)
        for name, seconds in times.items():
            plan = plans.get(name)  # None for stock
            rows.append(
                {
                    "bytes_per_rank": tensor.nbytes,
                    "algorithm": name,
                    "seconds": seconds,
                    "ratio_to_stock": median(a / b for a, b in zip(seconds, times["stock"], strict=True)),
                    "predicted_seconds": plan and planner.all_to_all_seconds(profile, plan, tensor.nbytes),
                    "plan": plan and str(plan),
                }
            )
    return {**record_header.header(), "topology": str(topology), "profile": profile.to_json(), "rows": rows}


def _by_plan(tensor: torch.Tensor, mesh: Mesh, plan: Plan) -> Any:
    fixed = replace(mesh, policy=PlanPolicy.fixed(plan))
    return lambda: reshard([tensor], 1, 2, fixed)


def _tensor(size: int, topology: Topology, device: torch.device) -> torch.Tensor:
    """Return a rank's random shard (B, H, S/P, D) of about `size` bytes."""
    ranks = topology.size
    tokens = max(1, round(size / (ranks * _HEAD_DIM * _DTYPE.itemsize)))
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(1, ranks, tokens, _HEAD_DIM, generator=generator).to(_DTYPE).to(device)


def show(record: dict[str, Any]) -> None:
    """Print a row for each size and algorithm."""
    print(f"{record['topology']}: median ms, predicted ms, and time relative to stock's")
    for row in record["rows"]:
        predicted = 1e3 * (row["predicted_seconds"] or float("nan"))
        name = f"auto = {row['plan']}" if row["algorithm"] == "auto" else row["algorithm"]
        times = f"{1e3 * median(row['seconds']):9.3f} {predicted:9.3f} {row['ratio_to_stock']:6.2f}x"
        print(f"{row['bytes_per_rank']:>12,} bytes {times}  {name}")


def parse_size(text: str) -> int:
    """Parse a size such as 4KB, 1MB or 500 to a number of bytes.

    Raises:
        argparse.ArgumentTypeError: it is not valid.
    """
    unit = text[-2:] if text[-2:] in _UNITS else ""
    return _UNITS[unit] * positive(text.removesuffix(unit))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on every rank, under torchrun or scripts/emulated_cluster.sh, and return the exit status."""
    parser = command_line.new_parser("a2a", "The all-to-all alone: stock's call, all plans, the planner's choice.")
    on_ranks.add_arguments(parser, "the launcher's")
    sizes = [4**power for power in range(6, 13)]
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=sizes, help="bytes per rank (4KB to 16MB)")
    parser.add_argument("--repeats", type=positive, default=5, help="rounds (%(default)s)")
    return command_line.run(parser, _measure_on_ranks, argv)


def _measure_on_ranks(options: argparse.Namespace) -> int:
    def work(group: dist.ProcessGroup, topology: Topology) -> dict[str, Any]:
        return measure(group, topology, bare_runtime.stock_all_to_all(), options.sizes, options.repeats)

    return on_ranks.run(options, work, show)


if __name__ == "__main__":
    sys.exit(main())
