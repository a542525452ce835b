"""The rows of a cell in the record: one per variant, predicted from its recorded steps.

The last recorded block of a kind stands for all further ones. The first is slower where launches decide: small kernels
come before it, so the host is not ahead of the device as it is from then on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from benchmarks.accelerator.prediction import predict
from benchmarks.accelerator.program import Program
from benchmarks.cluster import variants
from benchmarks.cluster.cell import Cell
from benchmarks.cluster.recording import KEYFRAME, Recording, record_split
from benchmarks.cluster.rules import COMBINED, SEPARATE, STOCK
from benchmarks.cluster.variants import BEST_STOCK, Variant
from benchmarks.full_size.architectures import ARCHITECTURES
from xfuser_cocodiff.xdit.session.schedule_tuner import choose_by_saving

_LOSSLESS_RULES = ("", STOCK, COMBINED, SEPARATE)
"""Rules that send values as they are; the plugin has none."""


@dataclass(eq=False)
class RecordedVariant:
    """A variant with its recorded steps, and what follows from them."""

    cell: Cell
    variant: Variant
    recording: Recording

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Predicted step time of all blocks, by program."""
        return self._full(lambda each: full_step_seconds(self.cell, each))

    @cached_property
    def chosen(self) -> dict[str, str]:
        """For each program of a run, itself or the overlap schedule that autotuning would choose in its place."""
        alternatives = self.recording.alternatives
        savings = {
            name: {each: 1 - self.seconds[each] / self.seconds[name] for each in alternatives.get(name, ())}
            for name in self.recording.weights
        }
        return {name: choose_by_saving(savings[name], name) for name in savings}

    @property
    def step_seconds(self) -> float:
        """Predicted time of a step, as the mean over a run."""
        return self._mean(self.seconds)

    def row(self) -> dict[str, Any]:
        """Return its row of the record, without speedups."""
        alone = self._mean(self._full(lambda each: full_step_seconds(self.cell, each, has_communication=False)))
        split, axes = self.variant.split, [axis.name for axis in self.cell.topology.axes]
        return {
            "mode": self.variant.name,
            "variant": self.variant.name,
            "split": {"ulysses": split.ulysses, "ring": split.ring},
            "schedule": self.chosen,
            "step_seconds": [self.step_seconds],
            "compute_seconds": alone,
            "exposed_seconds": self.step_seconds - alone,
            "bytes_per_link": {
                axis: self._mean(self._full(partial(full_step_bytes, self.cell, axis))) for axis in axes
            },
            "lossless": KEYFRAME not in self.recording.programs and self.variant.rule in _LOSSLESS_RULES,
        }

    def _full(self, value_of: Callable[[Program], float]) -> dict[str, float]:
        return {name: value_of(program) for name, program in self.recording.programs.items()}

    def _mean(self, values: Mapping[str, float]) -> float:
        """Return the mean over a run of values by program."""
        return sum(weight * values[self.chosen[name]] for name, weight in self.recording.weights.items())


def full_step_seconds(cell: Cell, program: Program, has_communication: bool = True) -> float:
    """Return the time of a step with all blocks, given one of the recorded blocks."""
    outcome = predict(program, cell, has_communication)
    return _with_further_blocks(cell, outcome.seconds, outcome.marks.__getitem__)


def full_step_bytes(cell: Cell, axis: str, program: Program) -> float:
    """Return the bytes that a rank sends along an axis in a step with all blocks."""

    def along_axis(sent: Mapping[int, float]) -> float:
        return sum(size for rank, size in sent.items() if cell.axis_to(rank) == axis)

    return _with_further_blocks(cell, along_axis(program.sent), lambda mark: along_axis(program.sent_at[mark]))


def _with_further_blocks(cell: Cell, recorded: float, at: Callable[[str], float]) -> float:
    """Return a value of all blocks, given that of the recorded ones and its values at the marks."""
    total = recorded
    for kind, count in ARCHITECTURES[cell.model].counts(cell.workload).items():
        last = min(cell.blocks, count) - 1  # SD3.5 has a single last block
        total += (count - 1 - last) * (at(f"{kind} {last} end") - at(f"{kind} {last} begin"))
    return cell.workload.calls * total


def predict_cell(cell: Cell, names: Sequence[str]) -> dict[str, Any]:
    """Return a cell of the record, given the names of its variants."""
    names = variants.expand(cell, names)
    described = {
        "machine": cell.machine.name,
        "nodes": cell.nodes,
        "ranks": cell.topology.size,
        "topology": str(cell.topology),
        "model": cell.model,
        "resolution": cell.resolution,
        "batch": cell.batch,
        "text_tokens": cell.workload.text_tokens,
        "blocks": cell.blocks,
        "modes": names,
        "slow_axes": list(cell.profile.slow_axes),
        "problem": cell.problem,
    }
    if cell.problem:
        return {**described, "rows": []}
    chosen = variants.parse(cell, names)
    recordings: dict[str, Recording] = {}
    for split in dict.fromkeys(each.split for each in chosen):
        recordings |= record_split(cell, split, [each for each in chosen if each.split == split])
    rows = [RecordedVariant(cell, each, recordings[each.name]).row() for each in chosen]
    return {**described, "rows": compare(rows, variants.candidates(names, chosen))}


def compare(rows: Sequence[dict[str, Any]], candidates: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Return the rows with their speedups, and the fastest of some once more.

    Args:
        rows: one per variant, of which some may be stock.
        candidates: variants of which the fastest one is the row of that name, such as BEST_STOCK.
    """
    compared = [dict(row) for row in rows]
    for name, names in candidates.items():
        fastest: dict[str, Any] = min([row for row in rows if row["mode"] in names], key=seconds)
        compared.append({**fastest, "mode": name})
    by_mode = {row["mode"]: row for row in compared}
    for key, baseline in (("speedup", by_mode.get(STOCK)), ("speedup_over_best_stock", by_mode.get(BEST_STOCK))):
        for row in compared:
            row[key] = seconds(baseline) / seconds(row) if baseline else None
    return compared


def seconds(row: dict[str, Any]) -> float:
    """Return the step time of a row."""
    return row["step_seconds"][0]
