"""Latency of the all-to-all alone by message size, stock's call against every plan."""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import command_line
from xfuser_cocodiff.cli import on_ranks
from xfuser_cocodiff.engine.attention.reshard import reshard
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.topology import planner
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.plans import Plan, candidates
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.emulation import links
from xfuser_cocodiff.lab.launching import bare_runtime
from xfuser_cocodiff.lab.probing import machine_profile
from xfuser_cocodiff.lab.probing.interleaved_timing import max_over_ranks, time_interleaved
from xfuser_cocodiff.lab.reporting import host
from xfuser_cocodiff.lab.reporting.progress import ProgressReporter
from xfuser_cocodiff.lab.simulation.collectives import lower_bound_seconds
from xfuser_cocodiff.xdit.platforms.platform import compute_device

SIZES = (*(4**power for power in range(6, 13)), 2**25)
"""Bytes per rank: 4 KB to 32 MB."""
_HEAD_DIM = 8
_DTYPE = torch.bfloat16


def measure(
    group: dist.ProcessGroup,
    topology: Topology,
    device: torch.device,
    stock: Callable[[torch.Tensor], torch.Tensor],
    sizes: Sequence[int],
    repeats: int,
) -> dict[str, Any]:
    """Time the sequence-to-heads all-to-all of stock, of :func:`fixed_plans` and of the planner's choice.

    Args:
        group: all ranks.
        topology: their topology.
        device: device of the tensor.
        stock: xDiT's own all-to-all of a tensor (B, H, S/P, D).
        sizes: bytes of that tensor on a rank, rounded to a divisible size.
        repeats: number of interleaved measurements of each.

    Returns:
        The record, the same on every rank.
    """
    progress = ProgressReporter(sys.stderr if dist.get_rank() == 0 else None)
    progress.report("probing the links")
    mesh = Mesh.over(group, topology, candidates(topology), device=device)
    started = time.perf_counter()
    profile = machine_profile.measure(mesh, device)
    probe_seconds = max_over_ranks(time.perf_counter() - started, device)
    cluster = links.from_environment()
    plans = {str(plan): plan for plan in fixed_plans(topology)}
    rows = []
    for size in sizes:
        tensor = _tensor(size, topology, device)
        progress.report(f"{_bytes(tensor.nbytes)} per rank")
        candidate_plans = plans | {"auto": planner.choose_plan(profile, tensor.nbytes)}
        calls: dict[str, Callable] = {"stock": functools.partial(stock, tensor)}
        calls |= {name: _by_plan(tensor, mesh, plan) for name, plan in candidate_plans.items()}
        _check_bits(calls, tensor.nbytes)
        times = time_interleaved(calls, repeats, device)
        for name, seconds in times.items():
            plan = candidate_plans.get(name)  # None for stock
            rows.append(
                {
                    "bytes_per_rank": tensor.nbytes,
                    "algorithm": name,
                    "seconds": seconds,
                    "ratio_to_stock": median(a / b for a, b in zip(seconds, times["stock"], strict=True)),
                    "bound_seconds": _bound(tensor.nbytes, cluster, profile),
                    "predicted_seconds": plan and planner.all_to_all_seconds(profile, plan, tensor.nbytes),
                    "plan": plan and str(plan),
                }
            )
    progress.close()
    return {
        **host.header(),
        "topology": str(topology),
        "rates": cluster and {axis: cluster.rate(axis) for axis in cluster.rates},
        "profile": profile.to_json(),
        "probe_seconds": probe_seconds,
        "rows": rows,
    }


def _check_bits(calls: dict[str, Callable], size: int) -> None:
    """Raise RuntimeError if the output of a plan differs from stock's."""
    expected = calls["stock"]()
    for name, call in calls.items():
        if name != "stock" and not torch.equal(expected, call()[0]):
            raise RuntimeError(f"the output of plan {name!r} differs from stock's, at {size} bytes per rank")


def fixed_plans(topology: Topology) -> list[Plan]:
    """Return the flat plan and every set of stages, innermost first and outermost first."""
    plans: list[Plan] = []
    for plan in candidates(topology):
        inward = sorted(plan.stages)
        if list(plan.stages) in (inward, inward[::-1]):
            plans.append(plan)
    return plans


def _by_plan(tensor: torch.Tensor, mesh: Mesh, plan: Plan) -> Any:
    fixed = replace(mesh, policy=PlanPolicy(lambda message_bytes: plan))
    return lambda: reshard([tensor], 1, 2, fixed)


def _tensor(size: int, topology: Topology, device: torch.device) -> torch.Tensor:
    """Return a rank's random shard (B, H, S/P, D) of about `size` bytes."""
    ranks = topology.size
    tokens = max(1, round(size / (ranks * _HEAD_DIM * _DTYPE.itemsize)))
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(1, ranks, tokens, _HEAD_DIM, generator=generator).to(_DTYPE).to(device)


def _bound(size: int, cluster: links.Cluster | None, profile: Profile) -> float:
    """Return the transfer time of the busiest link, at its emulated rate, else at its probed bandwidth; seconds."""
    if cluster is None:
        return lower_bound_seconds(profile, size)
    share = size / cluster.size
    return max(
        share * len(link.ranks) / (cluster.rate(link.axis) * 1e6 / 8)
        for rank in range(cluster.size)
        for link in cluster.links(rank)
    )


def show(record: dict[str, Any]) -> None:
    """Print a table of one row per size, with each algorithm's time relative to stock's."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 240)
    table = Table(box=None)
    for column in ("bytes per rank", "stock ms", "bound ms", "auto", "plan", "best fixed", "plan", "flat"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    for size in dict.fromkeys(row["bytes_per_rank"] for row in record["rows"]):
        rows = {row["algorithm"]: row for row in record["rows"] if row["bytes_per_rank"] == size}
        stock, auto = rows.pop("stock"), rows.pop("auto")
        best = min(rows.values(), key=lambda row: median(row["seconds"]))
        table.add_row(
            _bytes(size),
            f"{1000 * median(stock['seconds']):.2f}",
            f"{1000 * stock['bound_seconds']:.2f}",
            f"{auto['ratio_to_stock']:.2f}",
            auto["plan"],
            f"{best['ratio_to_stock']:.2f}",
            best["algorithm"],
            f"{rows['flat']['ratio_to_stock']:.2f}" if "flat" in rows else "-",
        )
    console.print(f"{record['topology']}, time relative to stock's (median of rounds)", table)


def _bytes(count: int) -> str:
    return f"{count / 2**20:.3g} MB" if count >= 2**20 else f"{count / 2**10:.3g} KB"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on every rank, under torchrun or scripts/emulated_cluster.sh, and return the exit status."""
    parser = command_line.new_parser("a2a", "The all-to-all alone: stock's call, fixed plans, the planner's choice.")
    on_ranks.add_arguments(parser)
    parser.add_argument("--sizes", help="bytes per rank, such as 4KB,1MB (default: 4KB to 32MB)")
    parser.add_argument("--repeats", type=command_line.at_least(1), default=5, help="rounds (%(default)s)")
    return command_line.run(parser, _measure_on_ranks, argv)


def _measure_on_ranks(options: argparse.Namespace) -> int:
    sizes = on_ranks.parse_sizes(options.sizes) if options.sizes else SIZES

    def work(group: dist.ProcessGroup, topology: Topology) -> dict[str, Any]:
        return measure(group, topology, compute_device(), bare_runtime.stock_all_to_all(), sizes, options.repeats)

    return on_ranks.run(options, work, show)


if __name__ == "__main__":
    sys.exit(main())
