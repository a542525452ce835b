"""Simulates denoising steps on machines that we only know on paper. Memory is not modelled."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from xfuser_cocodiff.simulation.layer import step
from xfuser_cocodiff.simulation.machines import MACHINES, Machine
from xfuser_cocodiff.simulation.scenario import MODES, STOCK, Scenario
from xfuser_cocodiff.simulation.workloads import WORKLOADS, Workload

ALL = "all"


@dataclass(frozen=True)
class Row:
    """A simulated step."""

    cluster: str
    nodes: int
    degree: int
    """Ulysses degree; ranks beyond it are in a ring."""
    ring_degree: int
    model: str
    resolution: int
    batch: int
    mode: str
    plan: str
    """How the all-to-all of one of Q, K, V and O runs."""
    message_bytes: int
    """What a rank holds of one of Q, K, V and O."""
    share: float
    """Part of stock's step that goes into all-to-alls."""
    step_seconds: float
    speedup: float
    """Stock's step over this one."""
    compute_seconds: float
    a2a_seconds: float
    ring_seconds: float
    hidden_seconds: float
    """How much of all-to-alls and ring passes while the rank computes."""


def simulate(
    machine: Machine, nodes: int, workload: Workload, resolution: int, batch: int = 1, mode: str = STOCK
) -> Row:
    """Simulate a step, averaged over the steps of a run.

    Args:
        machine: see :data:`machines.MACHINES`.
        nodes: all their ranks take part.
        workload: see :data:`workloads.WORKLOADS`.
        resolution: pixels on a side.
        batch: pictures.
        mode: name in :data:`scenario.MODES`.

    Raises:
        ValueError: an argument is not valid, or the model's heads do not divide over a node.
    """
    ours = MODES[_check_name("--mode", mode, MODES)]
    scenario = Scenario(machine, nodes, workload, resolution, batch)
    theirs, found = step(scenario, MODES[STOCK]), step(scenario, ours)
    return Row(
        cluster=machine.name,
        nodes=nodes,
        degree=scenario.ranks // scenario.ring_degree,
        ring_degree=scenario.ring_degree,
        model=workload.name,
        resolution=resolution,
        batch=batch,
        mode=mode,
        plan=str(scenario.plan(ours)),
        message_bytes=scenario.message_bytes,
        share=theirs.a2a / theirs.step,
        step_seconds=found.step,
        speedup=theirs.step / found.step,
        compute_seconds=found.compute,
        a2a_seconds=found.a2a,
        ring_seconds=found.ring,
        hidden_seconds=found.hidden,
    )


def sweep(
    clusters: str, nodes: str, models: str, resolutions: str, modes: str = ALL, batch: int = 1
) -> list[dict[str, Any]]:
    """Simulate every combination of options as a command line has them, modes varying fastest.

    Args:
        clusters: names in :data:`machines.MACHINES`, separated by commas, or 'all'.
        nodes: numbers of nodes, separated by commas.
        models: names in :data:`workloads.WORKLOADS`, or 'all'.
        resolutions: pixels on a side, separated by commas.
        modes: names in :data:`scenario.MODES`, or 'all'.
        batch: pictures.

    Returns:
        The rows of a `simulate` record.

    Raises:
        ValueError: an option is not valid, or a model's heads do not divide over a node.
    """
    chosen_modes = _names("--mode", modes, MODES)
    return [
        dataclasses.asdict(simulate(MACHINES[cluster], count, WORKLOADS[model], resolution, batch, mode))
        for cluster in _names("--cluster", clusters, MACHINES)
        for model in _names("--model", models, WORKLOADS)
        for count in _counts("--nodes", nodes)
        for resolution in _counts("--resolution", resolutions)
        for mode in chosen_modes
    ]


def _names(option: str, text: str, valid: Iterable[str]) -> list[str]:
    if text == ALL:
        return list(valid)
    return [_check_name(option, name.strip(), valid) for name in text.split(",")]


def _counts(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} {text!r} is not valid; it takes whole numbers separated by commas")
    return [int(part) for part in parts]


def _check_name(option: str, name: str, valid: Iterable[str]) -> str:
    if name not in valid:
        raise ValueError(f"{option} {name!r} is not valid; valid are {', '.join(valid)}")
    return name
