"""Measures the variants of a cell on an emulated cluster in slow motion."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from xfuser_cocodiff.lab.accelerator.program import Program
from xfuser_cocodiff.lab.accelerator.transport import Pace, Transport
from xfuser_cocodiff.lab.cluster_bench.cell import Cell
from xfuser_cocodiff.lab.cluster_bench.recording import RecordedSplit
from xfuser_cocodiff.lab.cluster_bench.scaling import axis_to, full_step_seconds
from xfuser_cocodiff.lab.cluster_bench.schedule_choice import choose_programs
from xfuser_cocodiff.lab.cluster_bench.validity import MAX_LATE_SHARE
from xfuser_cocodiff.lab.emulation import counters, dilation, links
from xfuser_cocodiff.lab.emulation.core_times import CoreTimes
from xfuser_cocodiff.lab.emulation.forked_ranks import run_forked

_TIMEOUT = timedelta(minutes=10)
SLOWER = 2.0
"""Factor on the dilation at which every step is measured once more."""
_ATTEMPTS = 3
"""Runs of a step of which a collective starts late, until it is taken as it is."""


@dataclass
class MeasuredProgram:
    """Measured times of one recorded step of all blocks, in seconds of the machine."""

    seconds: list[float] = field(default_factory=list)
    """Step times at the benchmark's dilation."""
    slower_seconds: float = 0.0
    """Step time at :data:`SLOWER` times the dilation."""
    late_seconds: float = 0.0
    """Longest time by which a collective started late."""
    num_repeated: int = 0
    """Runs that were repeated because a collective started late."""


@dataclass
class MeasuredVariant:
    """Measured steps of a variant."""

    programs: dict[str, MeasuredProgram]
    weights: dict[str, float]
    alternatives: dict[str, list[str]]


@dataclass
class MeasuredSplit:
    """Everything measured in one split."""

    variants: dict[str, MeasuredVariant]
    idle_share: float
    """Share of the period in which the busiest core was idle."""
    moved_bytes: dict[str, float]
    """Bytes that rank 0 has really sent along each axis, by the counters of its links."""
    expected_bytes: dict[str, float]
    """The same by the recorded collectives."""


@dataclass(frozen=True)
class Speed:
    """How slowly a cell runs."""

    dilation: float
    thinning: int
    repeats: int = 3


def measure_split(cell: Cell, recorded: RecordedSplit, speed: Speed) -> MeasuredSplit:
    """Run recorded steps on forked ranks, and return the times of the slowest rank.

    Raises:
        RankFailedError: a rank failed.
    """
    cluster = dilation.slow_cluster(cell.profile, speed.dilation * speed.thinning)

    def work(rank: int) -> MeasuredSplit:
        dist.init_process_group(dist.Backend.GLOO, timeout=_TIMEOUT)
        return _Runs(cell, recorded, speed).measure()

    return run_forked(cluster, work)[0]


class Run(NamedTuple):
    """One run of a recorded step, the same on all ranks; seconds of the machine."""

    seconds: float
    """Step time of all blocks."""
    recorded_seconds: float
    """Time of the recorded blocks alone."""
    late_seconds: float
    """Longest time by which a collective started late."""

    @property
    def is_disturbed(self) -> bool:
        """Whether a collective started late: another process of this machine took the core."""
        return self.late_seconds > MAX_LATE_SHARE * self.recorded_seconds


def least_disturbed(run: Callable[[], Run]) -> tuple[Run, int]:
    """Run a step, again while it is disturbed, and return the least disturbed run and the number of further runs.

    Args:
        run: runs the step, and returns the same on all ranks, so that all repeat it.
    """
    runs = [run()]
    while runs[-1].is_disturbed and len(runs) < _ATTEMPTS:
        runs.append(run())
    return min(runs, key=lambda each: each.late_seconds), len(runs) - 1


class _Runs:
    """Runs recorded steps on one rank."""

    def __init__(self, cell: Cell, recorded: RecordedSplit, speed: Speed) -> None:
        self._cell, self._recorded, self._speed = cell, recorded, speed
        self._programs = {
            (name, part): program
            for name, recording in recorded.recordings.items()
            for part, program in recording.programs.items()
        }
        self._transport = Transport(self._programs.values())
        self._cluster = links.of_this_rank()
        self._expected: dict[str, float] = {axis.name: 0.0 for axis in cell.topology.axes}

    def measure(self) -> MeasuredSplit:
        """Run all recorded steps at both dilations, in turns."""
        speed, programs = self._speed, self._programs
        measured = {key: MeasuredProgram() for key in programs}
        begin_bytes, begin_times = counters.payload_bytes(), CoreTimes.now()
        for _ in range(speed.repeats):
            for key, program in programs.items():
                run = self._run_undisturbed(program, speed.dilation, measured[key])
                measured[key].seconds.append(run.seconds)
                measured[key].late_seconds = max(run.late_seconds, measured[key].late_seconds)
        shares = CoreTimes.now().idle_shares(begin_times)
        dist.barrier()
        self._cluster = dilation.change_dilation(SLOWER * speed.dilation * speed.thinning)
        dist.barrier()
        for key, program in programs.items():
            measured[key].slower_seconds = self._run_undisturbed(
                program, SLOWER * speed.dilation, measured[key]
            ).seconds
        dist.barrier()
        moved = {axis: float(size - begin_bytes[axis]) for axis, size in counters.payload_bytes().items()}
        return MeasuredSplit(
            {
                name: MeasuredVariant(
                    {part: measured[name, part] for part in recording.programs},
                    recording.weights,
                    recording.alternatives,
                )
                for name, recording in self._recorded.recordings.items()
            },
            min(shares.values()),
            moved,
            self._expected,
        )

    def _run_undisturbed(self, program: Program, pace_dilation: float, measured: MeasuredProgram) -> Run:
        run, num_repeated = least_disturbed(lambda: self._run(program, pace_dilation))
        measured.num_repeated += num_repeated
        return run

    def _run(self, program: Program, pace_dilation: float) -> Run:
        """Run a step once; all ranks return the longest times of any rank."""
        cell = self._cell
        pace = Pace(pace_dilation, self._speed.thinning, cell.latency_seconds, cell.contention, self._unshaped_seconds)
        outcome = self._transport.run(program, pace)
        for rank, size in outcome.sent_bytes.items():
            self._expected[axis_to(cell.topology, dist.get_rank(), rank)] += size
        own_seconds = full_step_seconds(cell, self._recorded.counts, outcome)
        slowest = torch.tensor([own_seconds, outcome.seconds, outcome.late_seconds], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return Run(*slowest.tolist())

    def _unshaped_seconds(self, sent: dict[int, int]) -> float:
        """Return the real seconds by which the links move messages too fast, given the bytes to each rank."""
        by_axis: dict[str, int] = {}
        for rank, size in sent.items():
            axis = axis_to(self._cell.topology, dist.get_rank(), rank)
            by_axis[axis] = by_axis.get(axis, 0) + size
        return dilation.unshaped_seconds(self._cluster, by_axis)


def step_seconds(variant: MeasuredVariant) -> list[float]:
    """Return the mean step time of a run for each repeat, by the overlap schedule that autotuning would choose."""
    chosen = chosen_programs(variant)
    repeats = len(next(iter(variant.programs.values())).seconds)
    return [
        sum(weight * variant.programs[chosen[name]].seconds[repeat] for name, weight in variant.weights.items())
        for repeat in range(repeats)
    ]


def slower_step_seconds(variant: MeasuredVariant) -> float:
    """Return the mean step time of a run at :data:`SLOWER` times the dilation."""
    chosen = chosen_programs(variant)
    return sum(weight * variant.programs[chosen[name]].slower_seconds for name, weight in variant.weights.items())


def chosen_programs(variant: MeasuredVariant) -> dict[str, str]:
    """Return, for each program of a run, itself or the alternative that autotuning would choose."""
    seconds = {name: median(program.seconds) for name, program in variant.programs.items()}
    return choose_programs(variant.weights, variant.alternatives, seconds)
