"""Provides the record and the tables of `cocodiff plan --model`: how to split a degree for a full-size model."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from xfuser_cocodiff.engine.compression.mode_names import MODES
from xfuser_cocodiff.engine.compression.reference_memory import GIB
from xfuser_cocodiff.engine.topology.device_memory import DeviceMemory
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.topology import FLAT, Topology
from xfuser_cocodiff.lab.accelerator.accelerators import UNKNOWN, Accelerator
from xfuser_cocodiff.lab.reporting import host
from xfuser_cocodiff.lab.reporting.formatting import format_bytes, format_percent, format_seconds
from xfuser_cocodiff.lab.simulation import assumed_change, exchange
from xfuser_cocodiff.lab.simulation.communication import LayerCommunication
from xfuser_cocodiff.lab.simulation.machines import MACHINES, Machine
from xfuser_cocodiff.lab.simulation.scenario import STOCK, Scenario
from xfuser_cocodiff.lab.simulation.sharding import ulysses_degrees
from xfuser_cocodiff.lab.simulation.step_time import StepEstimate, estimate_step, rank_splits
from xfuser_cocodiff.lab.simulation.workloads import PIXELS_PER_TOKEN, WORKLOADS

ALIASES = {
    "flux1": "flux.1-dev",
    "flux2": "flux.2-dev",
    "sd35": "sd3.5-large",
    "hunyuan": "hunyuanvideo",
    "wan": "wan2.1-14b",
}
"""Short names of models."""


def make_scenario(
    model: str,
    resolution: int,
    degree: int,
    topology: str | None = None,
    profile: Path | None = None,
    cluster: str | None = None,
    steps: int = assumed_change.STEPS,
    batch: int = 1,
    text_tokens: int | None = None,
    teraflops: float | None = None,
    recorded: Path | None = None,
) -> Scenario:
    """Check the options of the command and return the scenario that they describe.

    Args:
        model: name in :data:`ALIASES` or :data:`workloads.WORKLOADS`.
        resolution: pixels per side, or rows of a video.
        degree: Ulysses degree times ring degree.
        topology: topology of all ranks; None for that of the profile or of the cluster's nodes.
        profile: file that `cocodiff probe --json` wrote.
        cluster: name in :data:`machines.MACHINES` or an alias. Exactly one of `cluster` and `profile` is required.
        steps: number of denoising steps.
        batch: number of images.
        text_tokens: text tokens of the prompt; None for the default of the model.
        teraflops: achieved TFLOP/s of a rank, in linear layers and attention; None for those of the cluster.
        recorded: folder of a recorded run, whose change per step sets the bits; None for the published one.

    Raises:
        ValueError: an option is not valid, or options contradict each other.
    """
    if (profile is None) == (cluster is None):
        raise ValueError(
            f"--model requires either --cluster, one of {', '.join(MACHINES)}, or --profile, a file that "
            "`cocodiff probe --json` wrote"
        )
    check_choice("--model", model, [*ALIASES, *WORKLOADS])
    check_count("--resolution", resolution, PIXELS_PER_TOKEN)
    for option, count in (("--degree", degree), ("--steps", steps), ("--batch", batch), ("--text-tokens", text_tokens)):
        if count is not None:
            check_count(option, count)
    if degree < 2:
        raise ValueError(f"--degree {degree} is not valid; it must be 2 or more")
    if teraflops is not None and not teraflops > 0:
        raise ValueError(f"--tflops {teraflops:g} is not valid; it must be greater than 0")
    requested = _parse_topology(topology, degree)
    accelerator: Accelerator | None = None
    link_profile: Callable[[Topology, float], Profile]
    if profile:
        measured = Profile.read(profile)
        whole, axes = requested or measured.topology, [axis.name for axis in measured.topology.axes]
        link_profile = functools.partial(_restrict_profile, measured)
        if teraflops:
            accelerator = dataclasses.replace(UNKNOWN, bytes_per_second=2 * measured.copy_bytes_per_second)
    else:
        check_choice("--cluster", str(cluster), [*MACHINES])
        machine = MACHINES[str(cluster)]
        whole, axes = requested or _default_topology(machine, degree), [link.name for link in machine.links]
        link_profile, accelerator = machine.link_profile, machine.accelerator
    if whole.size != degree:
        raise ValueError(f"topology {whole} has {whole.size} ranks, but --degree is {degree}")
    if unknown := [axis.name for axis in whole.axes if axis.name not in axes]:
        raise ValueError(
            f"--topology {whole}: {profile or cluster} has no axis {', '.join(unknown)}; valid are {', '.join(axes)}"
        )
    workload = WORKLOADS[ALIASES.get(model, model)]
    if text_tokens and not workload.text_tokens:
        raise ValueError(f"--text-tokens: the sequence of {workload.name} has no text")
    workload = dataclasses.replace(workload, text_tokens=text_tokens or workload.text_tokens)
    if teraflops and accelerator:
        accelerator = accelerator.with_flops(1e12 * teraflops)
    scenario = Scenario(workload, resolution, batch, steps, whole, link_profile, accelerator)
    if recorded is None:
        return scenario
    assumption = f"the change per step of the run in {recorded}"
    return dataclasses.replace(scenario, changes=assumed_change.of_record(recorded), assumption=assumption)


def _parse_topology(text: str | None, degree: int) -> Topology | None:
    try:
        return None if text is None else Topology.parse(text, degree if text.strip() == FLAT else None)
    except ValueError as error:
        raise ValueError(f"--topology: {error}") from None


def _restrict_profile(measured: Profile, topology: Topology, message_bytes: float) -> Profile:
    """Return a measured profile of some axes; its contention does not depend on the message size."""
    return measured.restrict_to(topology)


def check_count(option: str, value: int, multiple: int = 1) -> None:
    """Check that an option is a positive multiple.

    Raises:
        ValueError: it is not.
    """
    if value < 1 or value % multiple:
        valid = "1 or more" if multiple == 1 else f"a positive multiple of {multiple}"
        raise ValueError(f"{option} {value} is not valid; it must be {valid}")


def check_choice(option: str, name: str, valid: Iterable[str]) -> None:
    """Check that an option is one of the valid names.

    Raises:
        ValueError: it is not.
    """
    if name not in (names := list(valid)):
        raise ValueError(f"{option} {name!r} is not valid; valid are {', '.join(names)}")


def _default_topology(machine: Machine, degree: int) -> Topology:
    """Return the topology of whole nodes, or of part of one node."""
    nodes, rest = divmod(degree, machine.ranks_per_node)
    topology = machine.topology(1).contiguous(degree) if nodes == 0 else machine.topology(nodes)
    if (nodes and rest) or topology.axes[0].name == FLAT:
        raise ValueError(
            f"--degree {degree} does not fit the nodes of {machine.name}, which have {machine.ranks_per_node} ranks "
            f"({machine.topology(1)}); set --topology"
        )
    return topology


def record(mode: str | None = None, memory: float | None = None, **options: Any) -> dict[str, Any]:
    """Return the record: divisibility of heads and tokens, all splits, and all modes with the fastest split.

    Args:
        mode: mode for the splits; None for the default mode.
        memory: GiB of a device; None for that of the cluster's devices.
        options: arguments of :func:`make_scenario`.

    Raises:
        ValueError: an option is not valid, or no split is possible.
    """
    if mode is not None:
        check_choice("--mode", mode, MODES)
    if memory is not None and not 0 < memory < math.inf:
        raise ValueError(f"--memory {memory:g} is not valid; it must be greater than 0")
    scenario = make_scenario(**options)
    splits, heads, shard = rank_splits(scenario, mode), scenario.workload.heads, scenario.shard
    if not splits:
        raise ValueError(
            f"{scenario.topology.size} ranks as {scenario.topology} cannot be split into Ulysses groups and rings "
            "along the axes; choose another --topology or --degree"
        )
    stock = next(iter(rank_splits(scenario, STOCK)), None)
    stock_seconds = stock and stock.step_seconds

    def row(estimate: StepEstimate) -> dict[str, Any]:
        speedup = stock_seconds / estimate.step_seconds if stock_seconds and estimate.step_seconds else None
        return {**dataclasses.asdict(estimate), "speedup": speedup}

    device = _device_memory(scenario, memory)
    modes = [
        {**row(estimate_step(scenario, splits[0].split, name)), **_coded_layers(scenario, splits[0], name, device)}
        for name in MODES
    ]
    return {
        **host.header(),
        "model": scenario.workload.name,
        "resolution": scenario.resolution,
        "batch": scenario.batch,
        "steps": scenario.steps,
        "degree": scenario.topology.size,
        "topology": str(scenario.topology),
        "machine": str(options.get("profile") or options["cluster"]),
        "heads": heads,
        "ulysses_degrees": ulysses_degrees(heads, scenario.topology.size),
        "tokens_per_rank": {"image": shard.image, "text": shard.text},
        "remarks": list(shard.remarks),
        "problem": shard.problem,
        "slow_axes": list(scenario.slow_axes),
        "memory": device and {"device_bytes": device.total, "free_bytes": device.free},
        "stock": stock and {**row(stock), "share": stock.a2a_seconds / stock_seconds if stock_seconds else None},
        "splits": [row(estimate) for estimate in splits],
        "modes": modes,
        "assumption": scenario.assumption,
        "change_per_step": [round(each, 3) for each in assumed_change.stretch(scenario.changes, scenario.steps)],
        "flags": flags(splits[0], scenario.topology),
    }


def _device_memory(scenario: Scenario, gib: float | None) -> DeviceMemory | None:
    """Return the memory of a device that holds the transformer's weights only; None if its size is unknown."""
    if gib is None and scenario.accelerator:
        gib = scenario.accelerator.memory_gib
    return None if gib is None else DeviceMemory(gib * GIB - scenario.workload.weight_bytes, gib * GIB)


def _coded_layers(scenario: Scenario, best: StepEstimate, mode: str, device: DeviceMemory | None) -> dict[str, Any]:
    """Return the default memory budget in a mode, and the number of layers that it allows to be coded."""
    if device is None:
        return {}
    layer = LayerCommunication(scenario, best.split, mode)
    budget = layer.default_budget(device)
    return {"memory_budget": budget, "coded_layers": layer.coded_layers(budget), "layers": scenario.layer_calls}


def flags(best: StepEstimate, topology: Topology) -> str:
    """Return the flags of a launch script that select a split and a mode."""
    ring = f" --cocodiff_ring {best.placement}" if best.ring > 1 else ""
    degrees = f"--ulysses_degree {best.ulysses} --ring_degree {best.ring}"
    return f"{degrees} --use_cocodiff --cocodiff_topology {topology}{ring} --cocodiff_mode {best.mode}"


def show(record: dict[str, Any]) -> None:
    """Print a record."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    batch = f", batch {record['batch']}" if record["batch"] > 1 else ""
    console.print(
        f"{record['model']}, {record['resolution']} px{batch}, {record['steps']} steps; {record['degree']} ranks, "
        f"{record['topology']}, {record['machine']}; predicted, not measured"
    )
    console.print(*_divisibility_lines(record), sep="\n")
    if (stock := record["stock"]) and stock["step_seconds"]:
        console.print(
            f"stock's fastest split: {stock['ulysses']} x {stock['ring']}, step time "
            f"{format_seconds(stock['step_seconds'])}; all-to-alls {format_seconds(stock['a2a_seconds'])} "
            f"({format_percent(stock['share'])}), ring {format_seconds(stock['ring_seconds'])}"
        )
    sent = ("exchange", "Ulysses bytes", "ring bytes")
    print("\nsplits, fastest first (bytes and seconds per rank and step; Ulysses: all-to-alls and gathers of K and V):")
    console.print(_table(record["splits"], ("Ulysses x Ring", "placement", "Ulysses group", "mode", *sent)))
    print("\nmodes with the fastest split:")
    memory = record["memory"]
    coded = ("default budget", "coded layers") if memory else ()
    console.print(_table(record["modes"], ("mode", *sent, "references", "without prediction", *coded)))
    if memory:
        console.print(
            f"default budget of references: for a device of {memory['device_bytes'] / GIB:.3g} GiB, of which the "
            f"transformer's weights leave {memory['free_bytes'] / GIB:.3g} GiB; --memory sets another size"
        )
    console.print(*_exchange_lines(record), sep="\n")
    own_run = "; --record takes that of a run of yours" if record["assumption"] == assumed_change.DESCRIPTION else ""
    console.print(f"bits of lossy modes: assumed for {record['assumption']}{own_run}")
    last = record["modes"][-1]
    if not last["reference_bytes"] and not last["exchange_reason"]:
        console.print(
            "no axis is slow for this device: all modes are lossless; --cocodiff_slow_axes names axes to compress"
        )
    fix_first = " (after fixing the problem above)" if record["problem"] else ""
    console.print(f"\nflags{fix_first}: {record['flags']}")


def _divisibility_lines(record: dict[str, Any]) -> list[str]:
    degrees, tokens = record["ulysses_degrees"], record["tokens_per_rank"]
    heads = f"{record['heads']} heads: valid Ulysses degrees of stock are {', '.join(map(str, degrees))}"
    if degrees[-1] < record["degree"]:
        heads += "; for others the plugin zero-pads the heads"
    lines = [heads, f"tokens per rank: {tokens['image']} image, {tokens['text']} text", *record["remarks"]]
    return lines + ([f"problem: {record['problem']}"] if record["problem"] else [])


def _exchange_lines(record: dict[str, Any]) -> list[str]:
    """Return why K and V are gathered along slow axes or not, once for all modes with the same reason."""
    modes_by_reason: dict[str, list[str]] = {}
    for row in record["modes"]:
        if row["exchange_reason"]:
            modes_by_reason.setdefault(row["exchange_reason"], []).append(row["mode"])
    return [f"exchange in {', '.join(names)}: {reason}" for reason, names in modes_by_reason.items()]


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> Any:
    from rich.table import Table

    table, times = Table(box=None), ("Ulysses", "ring", "step time", "speedup")
    for column in (*columns, *times):
        table.add_column(column, justify="right" if column in times else "left", no_wrap=True)
    for row in rows:
        cells = {
            "Ulysses x Ring": f"{row['ulysses']} x {row['ring']}",
            "placement": row["placement"] if row["ring"] > 1 and row["ulysses"] > 1 else "",
            "Ulysses group": row["topology"],
            "mode": row["mode"],
            "exchange": exchange.describe(row["exchange"]),
            "Ulysses bytes": _format_axes(row["sent_bytes"]),
            "ring bytes": _format_axes(row["ring_bytes"]),
            "references": f"{row['reference_bytes'] / GIB:.2f} GiB",
            "without prediction": f"{row['compact_reference_bytes'] / GIB:.2f} GiB",
            "default budget": f"{row.get('memory_budget', 0) / GIB:.1f} GiB",
            "coded layers": f"{row.get('coded_layers')} of {row.get('layers')}",
        }
        seconds = (format_seconds(row[name]) for name in ("a2a_seconds", "ring_seconds", "step_seconds"))
        speedup = "" if row["speedup"] is None else f"{row['speedup']:.2f}x"
        table.add_row(*(cells[column] for column in columns), *seconds, speedup)
    return table


def _format_axes(sent_bytes: dict[str, float]) -> str:
    return ", ".join(f"{axis} {format_bytes(count)}" for axis, count in sent_bytes.items())
