"""Exposed communication and host waits of a step, by kind of block, from predictions of recorded steps.

Hiding the messages of some tensors saves the difference between the step and the same one in which they take no time.
These differences need not add up to the exposed time: one message can hide behind the wait for another.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.accelerator.prediction import Outcome, predict, without_communication
from benchmarks.cluster.cell import Cell
from benchmarks.cluster.rows import RecordedVariant
from benchmarks.cluster.scaling import (
    StepTotals,
    full_step_seconds,
    full_step_totals,
    kind_seconds,
    kind_totals,
)
from benchmarks.cluster.variants import Variant
from xfuser_cocodiff.engine.compression.mode_names import EXACT

MESSAGES = {"Q, K, V": ("qkv", "qk"), "V alone": ("v",), "ring K, V": ("kv",), "O": ("o",)}
"""Letters of the tensors of collectives, by what a table calls them."""
STEP = "step"
"""Name of the row of the whole step."""
LEGEND = (
    "host waits, exposed: time in which the device waits for the host, and for communication",
    "hide: time saved if these messages took none, at the same schedule; the columns need not add up to exposed",
    "bound: the longest of computation, busiest link and host",
)


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


def check_lossless(variants: Sequence[Variant]) -> None:
    """Check that all variants are lossless: the steps of others differ.

    Raises:
        ValueError: a variant is lossy.
    """
    for each in variants:
        if not (each.rule.is_lossless if each.rule else each.mode.startswith(EXACT)):
            raise ValueError(f"--modes {each.name!r} is not valid with --exposure, which needs lossless variants")


def exposures(recorded: RecordedVariant) -> list[Exposure]:
    """Return a row for each kind of block of a lossless variant, and one for the whole step."""
    cell, counts = recorded.cell, recorded.counts
    [name] = recorded.chosen.values()
    program = recorded.recording.programs[name]
    outcomes = {"": predict(program, cell), "alone": without_communication(program, cell)}
    for message, letters in MESSAGES.items():
        if instant := [each for each in program.collectives if each.tensors in letters]:
            outcomes[message] = predict(program, cell, instant)
    rows = [
        _row(cell, f"{count} {kind}", outcomes, partial(kind_seconds, cell, kind, count), totals)
        for kind, count in counts.items()
        for totals in [kind_totals(cell, kind, count, program)]
    ]
    totals = full_step_totals(cell, counts, program)
    return [*rows, _row(cell, STEP, outcomes, partial(full_step_seconds, cell, counts), totals)]


def _row(
    cell: Cell,
    blocks: str,
    outcomes: Mapping[str, Outcome],
    seconds_of: Callable[[Outcome], float],
    totals: StepTotals,
) -> Exposure:
    """Return a row, given how long its blocks take in an outcome, and what a rank does in them."""
    taken = {name: seconds_of(each) for name, each in outcomes.items()}
    seconds, alone = taken.pop(""), taken.pop("alone")
    return Exposure(
        blocks,
        seconds,
        kernel_seconds=totals.kernel_seconds,
        host_wait_seconds=alone - totals.kernel_seconds,
        exposed_seconds=seconds - alone,
        savings={name: seconds - each for name, each in taken.items()},
        link_seconds={axis: totals.link_bytes[axis] / rate for axis, rate in cell.rates.items()},
        host_seconds=totals.host_seconds,
    )


def table(variants: Sequence[RecordedVariant]) -> Any:
    """Return the table of a cell, in milliseconds of a step."""
    from rich.table import Table

    texts, hidden = ("variant", "blocks", "schedule"), [f"hide {name}" for name in MESSAGES]
    numbers = ("computation", "host waits", "exposed", *hidden, "busiest link", "host", "bound", "step", "of bound")
    shown = Table(box=None)
    for column in (*texts, *numbers):
        shown.add_column(column, justify="left" if column in texts else "right", no_wrap=True)
    for each in variants:
        split, [schedule] = each.variant.split, each.chosen.values()
        for row in exposures(each):
            link = max(row.link_seconds, key=lambda axis: row.link_seconds[axis])
            shown.add_row(
                *(f"{each.variant.name}, {split.ulysses} x {split.ring}", row.blocks, schedule),
                *map(_ms, (row.kernel_seconds, row.host_wait_seconds, row.exposed_seconds)),
                *(_ms(row.savings[name]) if name in row.savings else "-" for name in MESSAGES),
                f"{link} {_ms(row.link_seconds[link])}",
                *map(_ms, (row.host_seconds, row.bound_seconds, row.seconds)),
                f"{row.seconds / row.bound_seconds:.2f}x",
            )
    return shown


def _ms(seconds: float) -> str:
    return f"{round(1e3 * seconds, 1) + 0.0:.1f}"
