"""Provides the record and the table of `cocodiff plan`: whether the plugin pays for a model, and with which flags."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from xfuser_cocodiff.engine.compression.default_mode import MODES
from xfuser_cocodiff.engine.compression.reference_memory import GIB, default_budget
from xfuser_cocodiff.engine.topology.device_memory import DeviceMemory
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.topology import FLAT, Topology
from xfuser_cocodiff.tools.accelerator.accelerators import UNKNOWN
from xfuser_cocodiff.tools.reporting import record_header
from xfuser_cocodiff.tools.simulation import assumed_change
from xfuser_cocodiff.tools.simulation.communication import LayerCommunication
from xfuser_cocodiff.tools.simulation.machines import MACHINES, Machine
from xfuser_cocodiff.tools.simulation.scenario import STOCK, Scenario
from xfuser_cocodiff.tools.simulation.step_time import StepEstimate, rank_splits
from xfuser_cocodiff.tools.simulation.workloads import PIXELS_PER_TOKEN, find_workload


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
        machine: name in :data:`machines.MACHINES`, without a profile.
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
    if profile:
        if nodes or ranks:
            raise ValueError("--nodes and --ranks are not valid with --profile, which is of all ranks")
        measured = Profile.read(profile)
        topology = measured.topology
        unknown = replace(UNKNOWN, bytes_per_second=2 * measured.copy_bytes_per_second)
        accelerator = unknown if teraflops else None

        def link_profile(part: Topology, message_bytes: float) -> Profile:
            return measured.restrict_to(part)

    else:
        known = MACHINES[str(machine)]
        topology = _topology(known, nodes, ranks)
        link_profile, accelerator = known.link_profile, known.accelerator  # type: ignore[assignment]
    if topology.size < 2:
        raise ValueError("a single rank has no communication; valid are machines and profiles of 2 ranks or more")
    if teraflops and accelerator:
        accelerator = accelerator.with_flops(1e12 * teraflops)
    own: tuple[Any, ...] = ()
    if recorded:
        own = assumed_change.of_record(recorded), f"the change per step of the run in {recorded}"
    return Scenario(workload, resolution, batch, steps, topology, link_profile, accelerator, *own)


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
        "slow_axes": list(scenario.slow_axes_of(scenario.topology)),
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
