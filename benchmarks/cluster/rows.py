"""The rows of a cell in the record: one per variant, predicted from its recorded steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.accelerator.prediction import Outcome, predict, without_communication
from benchmarks.cluster import variants
from benchmarks.cluster.cell import Cell
from benchmarks.cluster.recording import KEYFRAME, Recording, record_split
from benchmarks.cluster.scaling import StepTotals, full_step_seconds, full_step_totals
from benchmarks.cluster.variants import BEST_STOCK, STOCK, Variant
from xfuser_cocodiff.lab.launching import transformer_wrappers
from xfuser_cocodiff.xdit.session.schedule_tuner import choose_by_saving


@dataclass(eq=False)
class RecordedVariant:
    """A variant with its recorded steps, and what follows from them."""

    cell: Cell
    variant: Variant
    recording: Recording
    counts: dict[str, int]
    """Number of blocks of each kind in the real model."""

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Predicted step time of all blocks, by program."""
        return self._full_seconds(predict)

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
        alone = self._mean(self._full_seconds(without_communication))
        totals = {
            name: full_step_totals(self.cell, self.counts, each) for name, each in self.recording.programs.items()
        }
        rule, split = self.variant.rule, self.variant.split
        return {
            "mode": self.variant.name,
            "variant": self.variant.name,
            "system": rule.text if rule else None,
            "split": {"ulysses": split.ulysses, "ring": split.ring},
            "exchange": self._means(totals, lambda each: each.collectives),
            "schedule": self.chosen,
            "step_seconds": [self.step_seconds],
            "compute_seconds": alone,
            "exposed_seconds": self.step_seconds - alone,
            "kernel_seconds": self._mean({name: each.kernel_seconds for name, each in totals.items()}),
            "host_seconds": self._mean({name: each.host_seconds for name, each in totals.items()}),
            "launches": self._mean({name: each.launches for name, each in totals.items()}),
            "bytes_per_link": self._means(totals, lambda each: each.link_bytes),
            "lossless": rule.is_lossless if rule else KEYFRAME not in self.recording.programs,
            "psnr_db": None,
        }

    def _full_seconds(self, predicted: Callable[..., Outcome]) -> dict[str, float]:
        programs = self.recording.programs.items()
        return {name: full_step_seconds(self.cell, self.counts, predicted(each, self.cell)) for name, each in programs}

    def _mean(self, values: Mapping[str, float]) -> float:
        """Return the mean over a run of values by program."""
        return sum(weight * values[self.chosen[name]] for name, weight in self.recording.weights.items())

    def _means(
        self, totals: Mapping[str, StepTotals], get: Callable[[StepTotals], Mapping[str, float]]
    ) -> dict[str, float]:
        """Return the means over a run of several values by program, each with a name of its own."""
        values = {program: get(each) for program, each in totals.items()}
        names = dict.fromkeys(name for each in values.values() for name in each)
        return {name: self._mean({key: each.get(name, 0.0) for key, each in values.items()}) for name in names}


def record_variants(cell: Cell, chosen: Sequence[Variant], report: Callable[[str], object]) -> list[RecordedVariant]:
    """Return variants of a cell with their recorded steps.

    Raises:
        RuntimeError: a variant cannot be recorded.
    """
    transformer_wrappers.preload(cell.model)
    recorded = dict[str, RecordedVariant]()
    for split, together in variants.by_split(chosen).items():
        report(f"{cell}: record {', '.join(each.name for each in together)}")
        of_split = record_split(cell, split, together)
        for each in together:
            recorded[each.name] = RecordedVariant(cell, each, of_split.recordings[each.name], of_split.counts)
    return [recorded[each.name] for each in chosen]


def describe(cell: Cell, names: Sequence[str]) -> dict[str, Any]:
    """Return what tells a cell of the record apart from others."""
    return {
        "machine": cell.machine.name,
        "nodes": cell.nodes,
        "ranks": cell.topology.size,
        "topology": str(cell.topology),
        "model": cell.model,
        "resolution": cell.resolution,
        "batch": cell.batch,
        "text_tokens": cell.workload.text_tokens,
        "blocks": cell.blocks,
        "launch_us": 1e6 * cell.machine.accelerator.launch_seconds,
        "modes": list(names),
        "slow_axes": list(cell.profile.slow_axes),
    }


def predict_cell(cell: Cell, names: Sequence[str], report: Callable[[str], object]) -> dict[str, Any]:
    """Return a cell of the record.

    Args:
        cell: the cell.
        names: of its variants.
        report: called with what is being recorded.

    Raises:
        RuntimeError: a variant cannot be recorded.
    """
    described = {**describe(cell, names), "problem": cell.problem}
    if cell.problem:
        return {**described, "rows": []}
    chosen = variants.parse(cell, names)
    rows = [each.row() for each in record_variants(cell, chosen, report)]
    return {**described, "rows": compare(rows, variants.contenders(names, chosen))}


def compare(rows: Sequence[dict[str, Any]], contenders: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Return the rows with their speedups, and the fastest of some once more.

    Args:
        rows: one per variant, of which some may be stock.
        contenders: variants of which the fastest one is the row of that name, such as BEST_STOCK.
    """
    best: list[dict[str, Any]] = []
    for name, names in contenders.items():
        fastest: dict[str, Any] = min([row for row in rows if row["mode"] in names], key=seconds)
        best.append({**fastest, "mode": name})
    compared = [dict(row) for row in (*rows, *best)]
    by_mode = {row["mode"]: row for row in compared}
    for key, baseline in (("speedup", by_mode.get(STOCK)), ("speedup_over_best_stock", by_mode.get(BEST_STOCK))):
        for row in compared:
            row[key] = seconds(baseline) / seconds(row) if baseline else None
    return compared


def seconds(row: dict[str, Any]) -> float:
    """Return the step time of a row."""
    return row["step_seconds"][0]
