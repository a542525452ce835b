"""What holds for all blocks of a model, from the recorded ones: step times and numbers of a step."""

from collections.abc import Mapping

from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.accelerator.transport import Outcome
from xfuser_cocodiff.lab.cluster_bench.cell import Cell


def full_step_seconds(cell: Cell, counts: Mapping[str, int], outcome: Outcome) -> float:
    """Return the time of a step with all blocks: the recorded blocks stand for all of their kind.

    Args:
        cell: the cell.
        counts: number of blocks of each kind in the real model.
        outcome: step of the recorded blocks.
    """
    total = outcome.seconds
    for kind, count in counts.items():
        durations = [_duration(outcome.marks, kind, index) for index in range(cell.blocks)]
        total += sum(durations) * (count / cell.blocks - 1)
    return cell.workload.calls * total


def full_step_factor(cell: Cell, counts: Mapping[str, int]) -> float:
    """Return the factor from sums over the recorded blocks, such as bytes, to those of a whole step."""
    return cell.workload.calls * sum(counts.values()) / (cell.blocks * len(counts))


def axis_to(topology: Topology, own: int, other: int) -> str:
    """Return the axis of the link between two ranks: the outermost one on which they differ."""
    places = zip(topology.axes, topology.coordinates(own), topology.coordinates(other), strict=True)
    return next(axis.name for axis, here, there in places if here != there)


def _duration(marks: Mapping[str, float], kind: str, index: int) -> float:
    return marks[f"{kind} {index} end"] - marks[f"{kind} {index} begin"]
