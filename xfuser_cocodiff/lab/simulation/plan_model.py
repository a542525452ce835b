"""The record of `cocodiff plan --model`: how to split a degree for a model of real size, on a machine or a profile."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from xfuser_cocodiff.engine.compression.reference_memory import GIB
from xfuser_cocodiff.engine.settings.options import MODES
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.topology import FLAT, Topology
from xfuser_cocodiff.lab.reporting import host
from xfuser_cocodiff.lab.reporting.formatting import format_bytes, format_percent, format_seconds
from xfuser_cocodiff.lab.simulation.machines import MACHINES, Machine
from xfuser_cocodiff.lab.simulation.sharding import ulysses_degrees
from xfuser_cocodiff.lab.simulation.step_time import STOCK, Case, StepEstimate, predict, predictions
from xfuser_cocodiff.lab.simulation.workloads import PIXELS_PER_TOKEN, WORKLOADS

ALIASES = {"flux1": "flux.1-dev", "flux2": "flux.2-dev", "sd35": "sd3.5-large"}
"""Short names of models."""


def case_of(
    model: str,
    resolution: int,
    degree: int,
    topology: str | None = None,
    profile: Path | None = None,
    cluster: str | None = None,
    steps: int = 50,
    batch: int = 1,
    text_tokens: int | None = None,
    teraflops: float | None = None,
) -> Case:
    """Return what is known of a model on the ranks that share its sequence.

    Args:
        model: one of :data:`ALIASES` or :data:`workloads.WORKLOADS`.
        resolution: pixels on a side.
        degree: Ulysses degree times Ring degree.
        topology: of all ranks; without it that of the profile, or of the cluster's nodes.
        profile: a file that `cocodiff probe --json` wrote.
        cluster: one of :data:`machines.MACHINES`; either it or `profile` has to be given.
        steps: denoising steps.
        batch: pictures.
        text_tokens: of the prompt; those of the pipeline if None.
        teraflops: what a rank reaches; the cluster's if None.

    Raises:
        ValueError: an option is not valid, or they do not go together.
    """
    if (profile is None) == (cluster is None):
        raise ValueError(
            f"--model needs one machine: --cluster, one of {', '.join(MACHINES)}, or --profile, a file that "
            "`cocodiff probe --json` wrote"
        )
    check_name("--model", model, [*ALIASES, *WORKLOADS])
    check_count("--resolution", resolution, PIXELS_PER_TOKEN)
    for option, count in (("--degree", degree), ("--steps", steps), ("--batch", batch), ("--text-tokens", text_tokens)):
        if count is not None:
            check_count(option, count)
    if degree < 2:
        raise ValueError("--degree 1 is not valid; there is nothing to split among fewer than 2 ranks")
    if teraflops is not None and not teraflops > 0:
        raise ValueError(f"--tflops {teraflops:g} is not valid; it is a number above 0")
    given, flops = _topology(topology, degree), teraflops and 1e12 * teraflops
    profile_of: Callable[[Topology, float], Profile]
    if profile:
        known = Profile.read(profile)
        whole, axes = given or known.topology, [axis.name for axis in known.topology.axes]
        profile_of = functools.partial(_along, known)
    else:
        check_name("--cluster", str(cluster), MACHINES)
        machine = MACHINES[str(cluster)]
        whole, axes = given or _nodes(machine, degree), [link.name for link in machine.links]
        profile_of, flops = machine.over, flops or machine.flops
    if whole.size != degree:
        raise ValueError(f"{whole} are {whole.size} ranks, but --degree is {degree}")
    if unknown := [axis.name for axis in whole.axes if axis.name not in axes]:
        raise ValueError(
            f"--topology {whole}: {profile or cluster} has no axis {', '.join(unknown)}, only {', '.join(axes)}"
        )
    workload = WORKLOADS[ALIASES.get(model, model)]
    workload = dataclasses.replace(workload, text_tokens=text_tokens or workload.text_tokens)
    return Case(workload, resolution, batch, steps, whole, profile_of, flops)


def _topology(text: str | None, degree: int) -> Topology | None:
    try:
        return None if text is None else Topology.parse(text, degree if text.strip() == FLAT else None)
    except ValueError as error:
        raise ValueError(f"--topology: {error}") from None


def _along(known: Profile, part: Topology, message_bytes: float) -> Profile:
    """Contention is as it was measured, whatever the message."""
    return known.restrict_to(part)


def check_count(option: str, value: int, multiple: int = 1) -> None:
    """Raise a ValueError unless an option is a positive multiple."""
    if value < 1 or value % multiple:
        what = "1 or more" if multiple == 1 else f"a positive multiple of {multiple}"
        raise ValueError(f"{option} {value} is not valid; it must be {what}")


def check_name(option: str, name: str, valid: Iterable[str]) -> None:
    """Raise a ValueError unless an option is one of the valid names."""
    if name not in (known := list(valid)):
        raise ValueError(f"{option} {name!r} is not valid; valid are {', '.join(known)}")


def _nodes(machine: Machine, degree: int) -> Topology:
    """Of whole nodes, or of a part of one."""
    nodes, rest = divmod(degree, machine.ranks_per_node)
    part = machine.topology(1).contiguous(degree) if nodes == 0 else machine.topology(nodes)
    if (nodes and rest) or part.axes[0].name == FLAT:
        raise ValueError(
            f"--degree {degree} does not fit nodes of {machine.name}, which have {machine.ranks_per_node} ranks as "
            f"{machine.topology(1)}; --topology says how its ranks lie"
        )
    return part


def record(mode: str | None = None, **options: Any) -> dict[str, Any]:
    """Return the record: how heads and tokens divide, every split, and every mode on the best of them.

    Args:
        mode: of the splits; None for that of a run without --cocodiff_mode.
        options: those of :func:`case_of`.

    Raises:
        ValueError: an option is not valid, or no split is possible.
    """
    if mode is not None:
        check_name("--mode", mode, MODES)
    case = case_of(**options)
    found, heads, held = predictions(case, mode), case.workload.heads, case.shard
    if not found:
        raise ValueError(
            f"no Ulysses degree among {case.topology.size} ranks, nor a ring beside it, lies on the axes of "
            f"{case.topology}; --topology or another --degree would help"
        )
    stock = next(iter(predictions(case, STOCK)), None)
    known = stock and stock.step_seconds

    def row(each: StepEstimate) -> dict[str, Any]:
        speedup = known / each.step_seconds if known and each.step_seconds else None
        return {**dataclasses.asdict(each), "speedup": speedup}

    return {
        **host.header(),
        "model": case.workload.name,
        "resolution": case.resolution,
        "batch": case.batch,
        "steps": case.steps,
        "degree": case.topology.size,
        "topology": str(case.topology),
        "machine": str(options.get("profile") or options["cluster"]),
        "heads": heads,
        "ulysses_degrees": ulysses_degrees(heads, case.topology.size),
        "tokens_per_rank": {"image": held.image, "text": held.text},
        "remarks": list(held.remarks),
        "problem": held.problem,
        "slow_axes": list(case.slow_axes),
        "stock": stock and {**row(stock), "share": stock.a2a_seconds / known if known else None},
        "splits": [row(each) for each in found],
        "modes": [row(predict(case, found[0].split, each)) for each in MODES],
        "flags": flags(found[0], case.topology),
    }


def flags(best: StepEstimate, whole: Topology) -> str:
    """Return what to add to a launch script."""
    ring = f" --cocodiff_ring {best.placement}" if best.ring > 1 else ""
    degrees = f"--ulysses_degree {best.ulysses} --ring_degree {best.ring}"
    return f"{degrees} --use_cocodiff --cocodiff_topology {whole}{ring} --cocodiff_mode {best.mode}"


def show(record: dict[str, Any]) -> None:
    """Print a record."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    batch = f", batch {record['batch']}" if record["batch"] > 1 else ""
    console.print(
        f"{record['model']}, {record['resolution']} px{batch}, {record['steps']} steps, {record['degree']} ranks as "
        f"{record['topology']} of {record['machine']}; predicted, not measured"
    )
    console.print(*_divisibility(record), sep="\n")
    if (stock := record["stock"]) and stock["step_seconds"]:
        console.print(
            f"stock's fastest split is {stock['ulysses']} x {stock['ring']}: "
            f"{format_seconds(stock['step_seconds'])} a step, of which all-to-alls "
            f"{format_seconds(stock['a2a_seconds'])} ({format_percent(stock['share'])}) and ring "
            f"{format_seconds(stock['ring_seconds'])}"
        )
    sent = ("all-to-all sends", "ring sends")
    print("\nsplits, the fastest first; bytes and times of one step on one rank:")
    console.print(_table(record["splits"], ("Ulysses x Ring", "ring lies", "Ulysses group", "mode", *sent)))
    print("\nmodes on the first of them:")
    console.print(_table(record["modes"], ("mode", *sent, "references", "in 8 bits")))
    if not record["modes"][-1]["reference_bytes"]:
        console.print("Nothing crosses nodes: every mode is lossless, unless --cocodiff_slow_axes names an axis.")
    console.print(f"\nflags{' for when that is mended' * bool(record['problem'])}: {record['flags']}")


def _divisibility(record: dict[str, Any]) -> list[str]:
    possible, held = record["ulysses_degrees"], record["tokens_per_rank"]
    allowed = f"{record['heads']} heads: stock's Ulysses degree must divide them, as {', '.join(map(str, possible))} do"
    if possible[-1] < record["degree"]:
        allowed += "; for others the plugin adds heads of zeros"
    lines = [allowed, f"a rank has {held['image']} image tokens and {held['text']} text tokens", *record["remarks"]]
    return lines + ([f"but {record['problem']}"] if record["problem"] else [])


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> Any:
    from rich.table import Table

    found, times = Table(box=None), ("all-to-all", "ring", "step", "speedup")
    for column in (*columns, *times):
        found.add_column(column, justify="right" if column in times else "left", no_wrap=True)
    for row in rows:
        known = {
            "Ulysses x Ring": f"{row['ulysses']} x {row['ring']}",
            "ring lies": row["placement"] if row["ring"] > 1 and row["ulysses"] > 1 else "",
            "Ulysses group": row["topology"],
            "mode": row["mode"],
            "all-to-all sends": _bytes(row["sent_bytes"]),
            "ring sends": _bytes(row["ring_bytes"]),
            "references": f"{row['reference_bytes'] / GIB:.2f} GiB",
            "in 8 bits": f"{row['compact_reference_bytes'] / GIB:.2f} GiB",
        }
        seconds = (format_seconds(row[name]) for name in ("a2a_seconds", "ring_seconds", "step_seconds"))
        speedup = "" if row["speedup"] is None else f"{row['speedup']:.2f}"
        found.add_row(*(known[column] for column in columns), *seconds, speedup)
    return found


def _bytes(sent: dict[str, float]) -> str:
    return ", ".join(f"{axis} {format_bytes(count)}" for axis, count in sent.items())
