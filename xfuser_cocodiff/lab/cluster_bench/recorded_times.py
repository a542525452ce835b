"""Step times of recorded steps that need no run: predicted ones, and those without communication."""

from collections.abc import Collection

from xfuser_cocodiff.lab.accelerator.prediction import predict
from xfuser_cocodiff.lab.accelerator.program import GroupPattern, Program, RecordedCollective
from xfuser_cocodiff.lab.accelerator.transport import Outcome, Pace
from xfuser_cocodiff.lab.cluster_bench.cell import Cell
from xfuser_cocodiff.lab.cluster_bench.scaling import axis_to


def predict_step(cell: Cell, program: Program, instant: Collection[RecordedCollective] = ()) -> Outcome:
    """Return a recorded step as the links of the cell let it run, but for collectives that take no time."""
    pace = Pace(1.0, 1, cell.latency_seconds, cell.contention)
    rates = {link.name: link.bytes_per_second for link in cell.profile.links}
    return predict(program, pace, rates, lambda rank: axis_to(cell.topology, 0, rank), instant)


def without_communication(program: Program) -> Outcome:
    """Return a recorded step on links without latency and of any bandwidth: computation and host alone."""
    ends: dict[RecordedCollective, float] = {}
    free: dict[GroupPattern, float] = {}
    for collective in program.collectives:
        end = max(free.get(collective.group, 0.0), collective.start.resolve(ends))
        ends[collective] = free[collective.group] = end
    marks = {name: instant.resolve(ends) for name, instant in program.marks.items()}
    return Outcome(program.end.resolve(ends), marks, 0.0, program.sent_bytes(0))
