"""`cocodiff bench model`: steps of a FLUX transformer, stock against the plugin's modes, on links of several speeds.

The links of an emulated cluster are scaled to vary the ratio of computation to communication. Stock's communication
share is the time that its all-to-alls add to a step without communication. (Time spent inside the calls is no measure:
ranks on oversubscribed cores wait in them for each other's computation.)
"""

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.bench import transformer, variant
from xfuser_cocodiff.lab.bench.transformer import Shape, Step
from xfuser_cocodiff.lab.bench.variant import Variant, without_communication
from xfuser_cocodiff.lab.emulation import links
from xfuser_cocodiff.lab.launching import bare_runtime
from xfuser_cocodiff.lab.probing import machine_profile
from xfuser_cocodiff.lab.probing.interleaved_timing import mean_over_ranks, time_interleaved
from xfuser_cocodiff.lab.reporting import host
from xfuser_cocodiff.lab.reporting.formatting import format_median_range
from xfuser_cocodiff.lab.reporting.progress import ProgressReporter
from xfuser_cocodiff.lab.simulation.collectives import lower_bound_seconds
from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit

TIMED_STEPS = 3
"""Steps of each variant in which its all-to-alls are timed, after the steps that measure step time."""
_MOST_STEPS = 80
_PACKET_SECONDS = 2e-3
"""Longer than the default, since messages are long here and small packets would take a fifth of the CPU time."""
_CPU = torch.device("cpu")


def parse_scales(text: str) -> list[float]:
    """Parse a list such as '1,0.25'.

    Raises:
        ValueError: an item is not a number above 0.
    """
    try:
        scales = [float(part) for part in text.split(",")]
    except ValueError:
        scales = [0.0]
    if not all(0 < scale < float("inf") for scale in scales):
        raise ValueError(f"--scale {text!r} is not valid; valid are numbers above 0, separated by commas")
    return scales


def measure(
    group: dist.ProcessGroup,
    topology: Topology,
    shape: Shape,
    link_scales: Sequence[float],
    modes: Sequence[str],
    repeats: int,
    compiled: bool = False,
) -> dict[str, Any]:
    """Time denoising steps of stock and of each mode at each scale of the links.

    Args:
        group: all ranks, on an emulated cluster.
        topology: their topology.
        shape: sizes of the transformer.
        link_scales: factors on the rates of the cluster's links.
        modes: each MODE[/PLAN] with options of the plugin, such as 'exact/flat@head_groups=2@v_first=on'.
        repeats: number of interleaved steps of each variant.
        compiled: whether all variants run a compiled transformer.

    Returns:
        The record, the same on every rank.

    Raises:
        ValueError: a mode is not valid, or this is not an emulated cluster.
    """
    split = UlyssesRingSplit(*(part.size() for part in bare_runtime.process_groups()))
    settings = {mode: variant.parse_mode(mode, topology, split) for mode in modes}
    cluster = links.from_environment()
    if cluster is None:
        raise ValueError("`bench model` changes the speed of its links: run it on scripts/emulated_cluster.sh")
    step = transformer.step(shape, bare_runtime.compile_transformer if compiled else None)
    progress = ProgressReporter(sys.stderr if dist.get_rank() == 0 else None)
    rows = []
    for scale in link_scales:
        progress.report(f"scale {scale:g}: probing the links")
        cluster = links.shape(scale, _PACKET_SECONDS)
        dist.barrier()
        profile = machine_profile.measure(Mesh.over(group, topology), _CPU)
        variants = {"stock": Variant(), **{mode: variant.of_mode(config, profile) for mode, config in settings.items()}}
        known = {"scale": scale, "compiled": compiled, "ring": split.ring}
        of_group = profile if split.ring == 1 else None
        progress.report(f"scale {scale:g}: measuring {', '.join(variants)}")
        rows += [
            {**known, **row} for row in _compare(variants, of_group, step, repeats, shape.message_bytes(topology.size))
        ]
    progress.close()
    sizes = {"width": shape.width, "depth": shape.depth, "tokens": shape.tokens, "heads": shape.heads}
    ranks = {"topology": str(topology), "ranks": topology.size}
    return {**host.header(), **ranks, "shape": sizes, "rates": dict(cluster.rates), "rows": rows}


def _warm_up(step: Step, tried: Variant, expected: torch.Tensor) -> bool:
    """Run steps until everything is tuned; return whether all outputs were bit-identical to `expected`."""
    equal = True
    for _ in range(_MOST_STEPS):
        equal &= torch.equal(tried.run(step), expected)
        if tried.session.is_tuned:
            break
    return equal


def _compare(
    variants: dict[str, Variant], profile: Profile | None, step: Step, repeats: int, exact_bytes: Sequence[int]
) -> list[dict[str, Any]]:
    expected = variants["stock"].run(step)
    equal = {mode: _warm_up(step, each, expected) for mode, each in variants.items()}
    runs = {mode: lambda each=each: each.run(step) for mode, each in variants.items()}
    # Keyframes are timed as the first step of a run, which drops all references.
    first = {mode: lambda each=each: each.run(step, first=True) for mode, each in variants.items() if each.runtime}
    # Computation is timed in the same rounds, since the speed of a machine drifts.
    times = time_interleaved({**runs, "alone": without_communication(step)}, repeats, _CPU)
    alone = median(times.pop("alone"))
    keyframes = {**times, **(time_interleaved(first, repeats, _CPU) if first else {})}
    for each in variants.values():
        each.session.traffic.timed = True
    time_interleaved(runs, TIMED_STEPS, _CPU)  # separate steps: timing the collectives costs time
    rows = []
    for mode, each in variants.items():
        each.session.traffic.timed = False
        weight = each.keyframe_fraction
        seconds = [weight * key + (1 - weight) * own for key, own in zip(keyframes[mode], times[mode], strict=True)]
        a2a = mean_over_ranks(median(each.a2a_seconds[-TIMED_STEPS:]), _CPU)
        rows.append(
            {
                "share": 1 - alone / median(times["stock"]),
                "mode": mode,
                "step_seconds": seconds,
                "alone_seconds": alone,
                "speedup": median(a / b for a, b in zip(times["stock"], seconds, strict=True)),
                "a2a_seconds": a2a or None,  # stock's collectives in a compiled graph are not visible
                "hidden_share": None,  # not measured
                "bit_equal": equal[mode],
                "bytes_slow_fraction": each.bytes_slow_fraction,
                "bound_seconds": _bound(exact_bytes, profile, each, alone),
                "plans": list(each.plans),
                "schedules": {
                    signature.name: str(signature.candidates.schedule)
                    for signature in each.session.layers.signatures
                    if signature.candidates
                },
            }
        )
    return rows


def _bound(exact_bytes: Sequence[int], profile: Profile | None, each: Variant, alone: float) -> float | None:
    """Return a lower bound of the step time without launch and codec overhead, in seconds.

    Exact modes: the longer of computation and the busiest link. Lossy modes: computation plus the compressed transfer.
    None with a ring, whose transfers are not modeled.
    """
    if profile is None:
        return None
    transfer = sum(lower_bound_seconds(profile, size) for size in exact_bytes)
    return alone + each.bytes_slow_fraction * transfer if each.runtime else max(alone, transfer)


def show(record: dict[str, Any]) -> None:
    """Print a table of one row per scale and mode."""
    from rich.console import Console
    from rich.table import Table

    table, left = Table(box=None), ("mode", "bits", "schedules", "plans")
    columns = ("scale", "comm share", "mode", "step time", "speedup", "bound", "a2a ms", "bytes", *left[1:])
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    stock: list[float] = []
    for row in record["rows"]:
        seconds = row["step_seconds"]
        stock = seconds if row["mode"] == "stock" else stock
        ratios = sorted(a / b for a, b in zip(stock, seconds, strict=True))
        table.add_row(
            *(f"{row['scale']:g}", f"{row['share']:.2f}", row["mode"], format_median_range(seconds)),
            f"{row['speedup']:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            f"{median(stock) / row['bound_seconds']:.2f}" if row["bound_seconds"] else "-",
            "-" if row["a2a_seconds"] is None else f"{1000 * row['a2a_seconds']:.0f}",
            *(f"{row['bytes_slow_fraction']:.3f}", "equal" if row["bit_equal"] else "differ"),
            *("; ".join(dict.fromkeys(row["schedules"].values())), ", ".join(row["plans"])),
        )
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    console.print(f"{record['topology']}, {record['shape']}", table)
