"""Provides the record and the table of `cocodiff plan`: whether the plugin pays for a model, and with which flags."""

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from xfuser_cocodiff.engine.compression.mode_names import EXACT, MODES
from xfuser_cocodiff.engine.compression.reference_memory import GIB, default_budget
from xfuser_cocodiff.engine.topology.device_memory import DeviceMemory
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.topology import FLAT, Topology
from xfuser_cocodiff.tools.accelerator.accelerators import UNKNOWN
from xfuser_cocodiff.tools.reporting import record_header
from xfuser_cocodiff.tools.reporting.formatting import NOT_MEASURED, format_bytes, format_percent, format_seconds
from xfuser_cocodiff.tools.simulation import assumed_change
from xfuser_cocodiff.tools.simulation.communication import LayerCommunication
from xfuser_cocodiff.tools.simulation.machines import MACHINES, Machine
from xfuser_cocodiff.tools.simulation.scenario import STOCK, Scenario
from xfuser_cocodiff.tools.simulation.step_time import StepEstimate, rank_splits
from xfuser_cocodiff.tools.simulation.workloads import PIXELS_PER_TOKEN, Workload, find_workload


def scenario_on_nodes(machine: Machine, nodes: int, workload: Workload, resolution: int, batch: int = 1) -> Scenario:
    """Return the scenario of a model on all ranks of some nodes of a known machine.

    Args:
        machine: cluster of the nodes.
        nodes: number of nodes.
        workload: model.
        resolution: pixels per side, or rows of a video.
        batch: number of images.
    """
    steps, accelerator = assumed_change.STEPS, machine.accelerator
    return Scenario(workload, resolution, batch, steps, machine.topology(nodes), machine.link_profile, accelerator)


def make_scenario(
    model: str,
    resolution: int,
    nodes: int | None = None,
    ranks: int | None = None,
    machine: str | None = None,
    profile: Path | None = None,
    steps: int = assumed_change.STEPS,
    batch: int = 1,
    text_tokens: int | None = None,
    teraflops: float | None = None,
    recorded: Path | None = None,
) -> Scenario:
    """Check the options of the command and return the scenario that they describe.

    Args:
        model: name of a model; see :func:`workloads.find_workload`.
        resolution: pixels per side, or rows of a video.
        nodes: number of nodes of the machine.
        ranks: number of ranks of the machine, in place of nodes.
        machine: name in :data:`machines.MACHINES`. Exactly one of `machine` and `profile` is required.
        profile: file that `cocodiff probe --json` wrote on all ranks.
        steps: number of denoising steps.
        batch: number of images.
        text_tokens: text tokens of the prompt; None for the default of the model.
        teraflops: achieved TFLOP/s of a rank, in linear layers and attention; None for those of the machine.
        recorded: folder of a recorded run, whose change per step sets the bits; None for the published one.

    Raises:
        ValueError: an option is not valid, or options contradict each other.
    """
    if resolution < 1 or resolution % PIXELS_PER_TOKEN:
        raise ValueError(f"--resolution {resolution} is not valid; valid are positive multiples of {PIXELS_PER_TOKEN}")
    workload = find_workload(model)
    if text_tokens and not workload.text_tokens:
        raise ValueError(f"--text-tokens: the sequence of {workload.name} has no text")
    workload = replace(workload, text_tokens=text_tokens or workload.text_tokens)
    if (profile is None) == (machine is None):
        raise ValueError("either --machine or --profile is required; a profile is what `cocodiff probe --json` wrote")
    if profile:
        if nodes or ranks:
            raise ValueError("--nodes and --ranks are not valid with --profile, which is of all ranks")
        measured = Profile.read(profile)
        topology = measured.topology
        link_profile: Callable[[Topology, float], Profile] = functools.partial(_restrict_profile, measured)
        unknown = replace(UNKNOWN, bytes_per_second=2 * measured.copy_bytes_per_second)
        accelerator = unknown if teraflops else None
    else:
        known = MACHINES[str(machine)]
        topology = _topology(known, nodes, ranks)
        link_profile, accelerator = known.link_profile, known.accelerator
    if topology.size < 2:
        raise ValueError("a single rank has no communication; valid are machines and profiles of 2 ranks or more")
    if teraflops and accelerator:
        accelerator = accelerator.with_flops(1e12 * teraflops)
    scenario = Scenario(workload, resolution, batch, steps, topology, link_profile, accelerator)
    if recorded is None:
        return scenario
    assumption = f"the change per step of the run in {recorded}"
    return replace(scenario, changes=assumed_change.of_record(recorded), assumption=assumption)


def _restrict_profile(measured: Profile, topology: Topology, message_bytes: float) -> Profile:
    """Return a measured profile of some axes; its contention does not depend on the message size."""
    return measured.restrict_to(topology)


def _topology(machine: Machine, nodes: int | None, ranks: int | None) -> Topology:
    """Return the topology of whole nodes, or of part of one node."""
    if (nodes is None) == (ranks is None):
        raise ValueError("either --nodes or --ranks is required")
    count, rest = (nodes, 0) if nodes else divmod(ranks or 0, machine.ranks_per_node)
    topology = machine.topology(count) if count else machine.topology(1).contiguous(rest)
    if (count and rest) or topology.axes[0].name == FLAT:
        raise ValueError(
            f"--ranks {ranks} does not fit the nodes of {machine.name}, which have {machine.ranks_per_node} ranks "
            f"({machine.topology(1)})"
        )
    return topology


def record(mode: str | None = None, **options: Any) -> dict[str, Any]:
    """Return the record: best stock, and each mode in its fastest split, or all splits of one mode.

    Args:
        mode: mode of which all splits are listed; None compares the modes.
        options: arguments of :func:`make_scenario`.

    Raises:
        ValueError: an option is not valid, or no split is possible.
    """
    scenario = make_scenario(**options)
    shard, stock = scenario.shard, next(iter(rank_splits(scenario, STOCK)), None)
    ranked = {each: rank_splits(scenario, each) for each in ([mode] if mode else MODES)}
    estimates = [each for splits in ranked.values() for each in (splits if mode else splits[:1])]
    if not estimates:
        raise ValueError(f"{scenario.topology} cannot be split into Ulysses groups and rings along its axes")
    return {
        **record_header.header(),
        "model": scenario.workload.name,
        "resolution": scenario.resolution,
        "batch": scenario.batch,
        "steps": scenario.steps,
        "ranks": scenario.topology.size,
        "topology": str(scenario.topology),
        "machine": str(options.get("profile") or options["machine"]),
        "heads": scenario.workload.heads,
        "tokens_per_rank": {"image": shard.image, "text": shard.text},
        "remarks": list(shard.remarks),
        "problem": shard.problem,
        "slow_axes": list(scenario.slow_axes),
        "rows": [_row(scenario, each, stock) for each in ([stock] if stock else []) + estimates],
        "assumption": scenario.assumption,
        "change_per_step": [round(each, 3) for each in assumed_change.stretch(scenario.changes, scenario.steps)],
    }


def _row(scenario: Scenario, estimate: StepEstimate, stock: StepEstimate | None) -> dict[str, Any]:
    seconds, baseline = estimate.step_seconds, stock and stock.step_seconds
    row = {
        **asdict(estimate),
        "speedup": baseline / seconds if baseline and seconds else None,
        "communication_share": estimate.a2a_seconds / seconds if seconds else None,
        "flags": flags(estimate, scenario.topology),
    }
    memory = scenario.accelerator and scenario.accelerator.memory_gib
    if memory and estimate.reference_bytes:
        # The device holds nothing but the transformer's weights.
        device = DeviceMemory(memory * GIB - scenario.workload.weight_bytes, memory * GIB)
        layer = LayerCommunication(scenario, estimate.split, estimate.mode)
        budget = default_budget(device, layer.resharding.layer_sizes, has_known_end=True)
        row |= {"coded_layers": layer.coded_layers(max(0.0, budget)), "layers": scenario.layer_calls}
    return row


def flags(estimate: StepEstimate, topology: Topology) -> str:
    """Return the flags of a launch script that select a split and a mode."""
    degrees = f"--ulysses_degree {estimate.split.ulysses} --ring_degree {estimate.split.ring}"
    if estimate.mode == STOCK:
        return degrees
    ring = f" --cocodiff_ring {estimate.split.placement}" if estimate.split.ring > 1 else ""
    return f"{degrees} --use_cocodiff --cocodiff_topology {topology}{ring} --cocodiff_mode {estimate.mode}"


def show(record: Mapping[str, Any]) -> None:
    """Print a record."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    batch = f", batch {record['batch']}" if record["batch"] > 1 else ""
    tokens = record["tokens_per_rank"]
    console.print(
        f"{record['model']}, {record['resolution']} px{batch}, {record['steps']} steps; {record['ranks']} ranks, "
        f"{record['topology']}, {record['machine']}; predicted, not measured",
        f"{record['heads']} heads; tokens per rank: {tokens['image']} image, {tokens['text']} text",
        *record["remarks"],
        *([f"problem: {record['problem']}"] if record["problem"] else []),
        sep="\n",
    )
    columns = ("", "Ulysses x Ring", "K, V gathered", "bytes", "references", "coded layers")
    table, numbers = Table(box=None), ("compute", "Ulysses", "ring", "host", "step time", "speedup")
    for column in (*columns, *numbers):
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    for row in record["rows"]:
        split, sent = row["split"], {axis: row["ring_bytes"].get(axis, 0.0) for axis in row["ring_bytes"]}
        sent = {axis: row["sent_bytes"].get(axis, 0.0) + sent.get(axis, 0.0) for axis in row["sent_bytes"] | sent}
        has_two = split["ring"] > 1 and split["ulysses"] > 1
        table.add_row(
            f"best {STOCK}" if row["mode"] == STOCK else row["mode"],
            f"{split['ulysses']} x {split['ring']}{' ' + split['placement'] if has_two else ''}",
            "+".join(row["gathered"]) or NOT_MEASURED,
            ", ".join(f"{axis} {format_bytes(count)}" for axis, count in sent.items()),
            f"{row['reference_bytes'] / GIB:.2f} GiB" if row["reference_bytes"] else NOT_MEASURED,
            f"{row['coded_layers']} of {row['layers']}" if "layers" in row else NOT_MEASURED,
            *(format_seconds(row[f"{part}_seconds"]) for part in ("compute", "a2a", "ring", "host", "step")),
            f"{row['speedup']:.2f}x" if row["speedup"] else NOT_MEASURED,
        )
    console.print(table)
    for line in _notes(record):
        console.print(line, soft_wrap=True)


def _notes(record: Mapping[str, Any]) -> list[str]:
    """Return what to know about the table, and the flags of each row."""
    own_run = "; --record takes that of a run of yours" if record["assumption"] == assumed_change.DESCRIPTION else ""
    notes = [
        "bytes and seconds are those of a rank and step; references: memory of a rank",
        f"bits of lossy modes: for {record['assumption']}{own_run}",
    ]
    by_mode = {row["mode"]: row for row in record["rows"]}
    if share := by_mode.get(STOCK, {}).get("communication_share"):
        notes.append(f"communication share of stock's step, all-to-alls only: {format_percent(share)}")
    if any(row["is_left_lossless"] for row in by_mode.values()):
        notes.append(
            "lossy modes code nothing: coding would add more host time than it saves link time; --cocodiff_slow_axes "
            "names axes to compress all the same"
        )
    elif not any(row["reference_bytes"] for row in by_mode.values()) and {*by_mode} - {STOCK, EXACT}:
        notes.append("lossy modes code nothing: no axis is slow for this device; --cocodiff_slow_axes names axes")
    fix_first = " (after fixing the problem above)" if record["problem"] else ""
    fastest = {row["mode"]: row["flags"] for row in reversed(record["rows"])}
    return [*notes, f"flags{fix_first}:", *(f"  {mode}: {text}" for mode, text in reversed(fastest.items()))]
