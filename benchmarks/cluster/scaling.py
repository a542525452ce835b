"""Step times and totals of all blocks of a model, from the recorded blocks.

The last recorded block of a kind stands for all further ones. The first is slower where launches decide: small kernels
come before it, so the host is not ahead of the device as it is from then on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.accelerator.prediction import Outcome
from benchmarks.accelerator.program import Counts, Program
from benchmarks.cluster.cell import Cell


def full_step_seconds(cell: Cell, counts: Mapping[str, int], outcome: Outcome) -> float:
    """Return the time of a step with all blocks.

    Args:
        cell: the cell.
        counts: number of blocks of each kind in the real model.
        outcome: step of the recorded blocks.
    """
    further = (
        number * _duration(outcome.marks, kind, index)
        for kind, count in counts.items()
        for index, number in enumerate(_further(cell, count))
    )
    return cell.workload.calls * (outcome.seconds + sum(further))


def kind_seconds(cell: Cell, kind: str, count: int, outcome: Outcome) -> float:
    """Return the time of all blocks of a kind in a step, of which the real model has `count`."""
    durations = (
        (1 + further) * _duration(outcome.marks, kind, index) for index, further in enumerate(_further(cell, count))
    )
    return cell.workload.calls * sum(durations)


def _further(cell: Cell, count: int) -> list[int]:
    """Return for how many further blocks each recorded block of a kind stands, of which a model has `count`."""
    recorded = min(cell.blocks, count)  # SD3.5 has a single last block
    return [0] * (recorded - 1) + [count - recorded]


@dataclass(frozen=True)
class StepTotals:
    """What a rank does in a step with all blocks."""

    kernel_seconds: float
    """Durations of all kernels."""
    host_seconds: float
    """Host time of all calls."""
    launches: float
    """Number of kernels."""
    link_bytes: dict[str, float]
    """Bytes sent along each axis."""
    collectives: dict[str, float]
    """Number of collectives by the axes that their groups span, such as "node+gpu"."""


def full_step_totals(cell: Cell, counts: Mapping[str, int], program: Program) -> StepTotals:
    """Return what a rank does in a step with all blocks; see :func:`full_step_seconds`."""
    parts: list[_Part] = [(1.0, Counts(0.0, 0.0, 0, 0), program.counts_so_far())]
    for kind, count in counts.items():
        parts += _block_parts(kind, program, _further(cell, count))
    return _totals(cell, program, parts)


def kind_totals(cell: Cell, kind: str, count: int, program: Program) -> StepTotals:
    """Return what a rank does in all blocks of a kind in a step; see :func:`kind_seconds`."""
    return _totals(cell, program, _block_parts(kind, program, [1 + further for further in _further(cell, count)]))


_Part = tuple[float, Counts, Counts]
"""Part of a recorded step: how often it counts, and what the step has done at its begin and at its end."""


def _block_parts(kind: str, program: Program, weights: Sequence[int]) -> list[_Part]:
    names = ((weight, f"{kind} {index}") for index, weight in enumerate(weights))
    return [(weight, program.counts[f"{name} begin"], program.counts[f"{name} end"]) for weight, name in names]


def _totals(cell: Cell, program: Program, parts: Sequence[_Part]) -> StepTotals:
    link_bytes = dict.fromkeys((axis.name for axis in cell.topology.axes), 0.0)
    collectives: dict[str, float] = {}
    kernel_seconds = host_seconds = launches = 0.0
    for weight, begin, end in parts:
        weight *= cell.workload.calls
        kernel_seconds += weight * (end.kernel_seconds - begin.kernel_seconds)
        host_seconds += weight * (end.host_seconds - begin.host_seconds)
        launches += weight * (end.launches - begin.launches)
        for rank, size in program.sent_bytes(0, slice(begin.collectives, end.collectives)).items():
            link_bytes[cell.axis_to(rank)] += weight * size
        for collective in program.collectives[begin.collectives : end.collectives]:
            axes = "+".join(cell.spanned_axes(collective.group.members(0)))
            collectives[axes] = collectives.get(axes, 0.0) + weight
    return StepTotals(kernel_seconds, host_seconds, launches, link_bytes, collectives)


def _duration(marks: Mapping[str, float], kind: str, index: int) -> float:
    return marks[f"{kind} {index} end"] - marks[f"{kind} {index} begin"]
