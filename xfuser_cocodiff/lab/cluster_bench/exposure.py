"""Exposed communication and host waits of a step, by kind of block, from predictions of recorded steps.

Hiding the messages of some tensors saves the difference between the step and the same one in which they take no time.
These differences need not add up to the exposed time: one message can hide behind the wait for another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from xfuser_cocodiff.engine.compression.mode_names import EXACT
from xfuser_cocodiff.lab.accelerator.program import Program
from xfuser_cocodiff.lab.accelerator.transport import Outcome
from xfuser_cocodiff.lab.cluster_bench.benchmark import variants_by_split
from xfuser_cocodiff.lab.cluster_bench.cell import Cell
from xfuser_cocodiff.lab.cluster_bench.cell_rows import RecordedVariant, recorded_variants
from xfuser_cocodiff.lab.cluster_bench.recorded_times import predict_step, without_communication
from xfuser_cocodiff.lab.cluster_bench.recording import record_split
from xfuser_cocodiff.lab.cluster_bench.requested_cells import RequestedCell
from xfuser_cocodiff.lab.cluster_bench.scaling import (
    StepTotals,
    full_step_seconds,
    full_step_totals,
    kind_seconds,
    kind_totals,
)
from xfuser_cocodiff.lab.cluster_bench.variants import Variant
from xfuser_cocodiff.lab.launching import transformer_wrappers

DEFAULT_MODES = "stock,exact"
MESSAGES = {"Q, K, V": ("qkv", "qk"), "V alone": ("v",), "ring K, V": ("kv",), "O": ("o",)}
"""Letters of the tensors of collectives, by what a table calls them."""
STEP = "step"
"""Name of the row of the whole step."""


@dataclass(frozen=True)
class Exposure:
    """Times of all blocks of a kind, or of a whole step, in seconds."""

    blocks: str
    """Number and kind of the blocks, or STEP."""
    seconds: float
    """Predicted time."""
    kernel_seconds: float
    """Computation: durations of all kernels."""
    host_wait_seconds: float
    """Time in which the device waits for the host, on links that take no time."""
    exposed_seconds: float
    """Time in which the device waits for communication."""
    savings: Mapping[str, float]
    """Time that would be saved if the messages of some tensors took none, by the names of :data:`MESSAGES`."""
    link_seconds: Mapping[str, float]
    """Time in which each link sends at its bandwidth."""
    host_seconds: float
    """Host time of all calls."""

    @property
    def bound_seconds(self) -> float:
        """Time of the busiest of device, links and host."""
        return max(self.kernel_seconds, self.host_seconds, *self.link_seconds.values())


@dataclass(frozen=True)
class VariantExposure:
    """A variant with its rows."""

    variant: Variant
    schedule: str
    """Program of the chosen overlap schedule."""
    rows: Sequence[Exposure]


def check_lossless(requested: RequestedCell) -> None:
    """Check that all variants are lossless: the steps of others differ.

    Raises:
        ValueError: a variant is lossy.
    """
    for each in requested.variants:
        if not (each.rule.is_lossless if each.rule else each.mode.startswith(EXACT)):
            raise ValueError(f"--modes {each.name!r} is not valid with --exposure, which needs lossless variants")


def expose(requested: RequestedCell) -> Iterator[VariantExposure]:
    """Record the lossless variants of a cell, and yield what each of them waits for.

    Raises:
        RuntimeError: a variant cannot be recorded.
    """
    cell = requested.cell
    transformer_wrappers.preload(cell.model)
    for split, variants in variants_by_split(requested.variants).items():
        for recorded in recorded_variants(cell, record_split(cell, split, variants), variants):
            [schedule] = recorded.chosen_by_prediction().values()
            yield VariantExposure(recorded.variant, schedule, exposures(recorded, schedule))


def exposures(recorded: RecordedVariant, name: str) -> list[Exposure]:
    """Return a row for each kind of block, and one for the whole step.

    Args:
        recorded: a variant.
        name: the program of the step.
    """
    cell, counts, program = recorded.cell, recorded.counts, recorded.recording.programs[name]
    outcomes = _Outcomes.of(cell, program)
    rows = [
        _row(cell, f"{count} {kind}", outcomes, partial(kind_seconds, cell, kind, count), totals)
        for kind, count in counts.items()
        for totals in [kind_totals(cell, kind, count, program)]
    ]
    totals = full_step_totals(cell, counts, program)
    return [*rows, _row(cell, STEP, outcomes, partial(full_step_seconds, cell, counts), totals)]


@dataclass(frozen=True)
class _Outcomes:
    """Predictions of a recorded step."""

    predicted: Outcome
    alone: Outcome
    """Without communication."""
    hidden: Mapping[str, Outcome]
    """With messages that take no time, by the names of :data:`MESSAGES`; only those that the step has."""

    @classmethod
    def of(cls, cell: Cell, program: Program) -> "_Outcomes":
        hidden = {}
        for name, letters in MESSAGES.items():
            if messages := [each for each in program.collectives if each.tensors in letters]:
                hidden[name] = predict_step(cell, program, messages)
        return cls(predict_step(cell, program), without_communication(program), hidden)


def _row(
    cell: Cell, blocks: str, outcomes: _Outcomes, seconds_of: Callable[[Outcome], float], totals: StepTotals
) -> Exposure:
    """Return a row, given how long its blocks take in an outcome, and what a rank does in them."""
    seconds, alone = seconds_of(outcomes.predicted), seconds_of(outcomes.alone)
    return Exposure(
        blocks,
        seconds,
        kernel_seconds=totals.kernel_seconds,
        host_wait_seconds=alone - totals.kernel_seconds,
        exposed_seconds=seconds - alone,
        savings={name: seconds - seconds_of(each) for name, each in outcomes.hidden.items()},
        link_seconds={link.name: totals.link_bytes[link.name] / link.bytes_per_second for link in cell.profile.links},
        host_seconds=totals.host_seconds,
    )
