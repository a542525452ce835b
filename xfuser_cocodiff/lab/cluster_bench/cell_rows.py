"""The rows of a cell in the record: one per variant, from its recorded and its measured steps."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

from xfuser_cocodiff.engine.compression.mode_names import MODES
from xfuser_cocodiff.lab.accelerator.transport import Outcome
from xfuser_cocodiff.lab.cluster_bench import measurement
from xfuser_cocodiff.lab.cluster_bench.cell import Cell
from xfuser_cocodiff.lab.cluster_bench.coded_exchange import coded_exchanges
from xfuser_cocodiff.lab.cluster_bench.measurement import MeasuredSplit, MeasuredVariant
from xfuser_cocodiff.lab.cluster_bench.quality_record import QualityRecord
from xfuser_cocodiff.lab.cluster_bench.recorded_times import predict_step, without_communication
from xfuser_cocodiff.lab.cluster_bench.recording import KEYFRAME, RecordedSplit, Recording
from xfuser_cocodiff.lab.cluster_bench.scaling import full_step_seconds, full_step_totals
from xfuser_cocodiff.lab.cluster_bench.schedule_choice import choose_programs
from xfuser_cocodiff.lab.cluster_bench.validity import Evidence
from xfuser_cocodiff.lab.cluster_bench.variants import BEST_STOCK, STOCK, Variant
from xfuser_cocodiff.lab.simulation.scenario import STOCK as SIMULATED_STOCK
from xfuser_cocodiff.lab.simulation.step_time import estimate_step

_CLEARLY_SLOWER = 1.05
"""Predicted step time over the best one from which on an overlap schedule is not measured; predictions are within 3 %
of measurements."""

_HOPELESS = 1.1
"""Predicted step time over that of stock's fastest split from which on another split of stock is not measured."""


@dataclass(eq=False)
class RecordedVariant:
    """A variant with its recorded steps, and what follows from them alone."""

    cell: Cell
    variant: Variant
    recording: Recording
    counts: dict[str, int]
    """Number of blocks of each kind in the real model."""

    @cached_property
    def predictions(self) -> dict[str, Outcome]:
        """Predicted step of the recorded blocks, by program."""
        return {name: predict_step(self.cell, program) for name, program in self.recording.programs.items()}

    @property
    def predicted_seconds(self) -> dict[str, float]:
        """Predicted step time of all blocks, by program."""
        return {name: self._full_seconds(outcome) for name, outcome in self.predictions.items()}

    def chosen_by_prediction(self) -> dict[str, str]:
        """Return, for each program of a run, itself or the alternative that autotuning would choose by prediction."""
        return choose_programs(self.recording.weights, self.recording.alternatives, self.predicted_seconds)

    @cached_property
    def predicted_step_seconds(self) -> float:
        """Predicted time of a step, as the mean over a run."""
        return self._mean(self.predicted_seconds, self.chosen_by_prediction())

    def without_slow_alternatives(self) -> Recording:
        """Return the recording without alternatives that are predicted to be clearly slower than the best one."""
        recording, seconds = self.recording, self.predicted_seconds
        best = self.chosen_by_prediction()
        alternatives = {
            name: [each for each in others if seconds[each] <= _CLEARLY_SLOWER * seconds[best[name]]]
            for name, others in recording.alternatives.items()
        }
        kept = {*recording.weights, *itertools.chain.from_iterable(alternatives.values())}
        programs = {name: program for name, program in recording.programs.items() if name in kept}
        return replace(recording, programs=programs, alternatives=alternatives)

    def row(self, chosen: Mapping[str, str], quality: QualityRecord) -> dict[str, Any]:
        """Return what follows from the recorded steps, given the chosen programs."""
        programs = self.recording.programs
        alone = {name: self._full_seconds(without_communication(each)) for name, each in programs.items()}
        totals = {name: full_step_totals(self.cell, self.counts, each) for name, each in programs.items()}
        cell = {"topology": str(self.cell.topology), "slow_axes": self.cell.profile.slow_axes}
        row: dict[str, Any] = {
            "mode": self.variant.name,
            "variant": self.variant.name,
            "system": self.variant.rule.text if self.variant.rule else None,
            "split": {"ulysses": self.variant.split.ulysses, "ring": self.variant.split.ring},
        }
        workload = self.cell.workload
        heads = workload.heads, workload.heads // workload.heads_per_kv_head
        row["coded_exchanges"] = list(coded_exchanges(cell, row, heads))
        return {
            **row,
            "exchange": self._means({name: each.collectives for name, each in totals.items()}, chosen),
            "schedule": dict(chosen),
            "predicted_seconds": self._mean(self.predicted_seconds, chosen),
            "simulated_seconds": self._simulated_seconds(),
            "compute_seconds": self._mean(alone, chosen),
            "kernel_seconds": self._mean({name: each.kernel_seconds for name, each in totals.items()}, chosen),
            "host_seconds": self._mean({name: each.host_seconds for name, each in totals.items()}, chosen),
            "launches": self._mean({name: each.launches for name, each in totals.items()}, chosen),
            "bytes_per_link": self._means({name: each.link_bytes for name, each in totals.items()}, chosen),
            "lossless": self._is_lossless,
            "psnr_db": None if self._is_lossless else quality.psnr_db(cell, row),
        }

    def _mean(self, values: Mapping[str, float], chosen: Mapping[str, str]) -> float:
        """Return the mean over a run of values by program."""
        return sum(weight * values[chosen[name]] for name, weight in self.recording.weights.items())

    def _means(self, values: Mapping[str, Mapping[str, float]], chosen: Mapping[str, str]) -> dict[str, float]:
        """Return the means over a run of several values by program, each with a name of its own."""
        names = dict.fromkeys(name for each in values.values() for name in each)
        return {
            name: self._mean({program: each.get(name, 0.0) for program, each in values.items()}, chosen)
            for name in names
        }

    @property
    def _is_lossless(self) -> bool:
        rule = self.variant.rule
        if rule:
            return rule.is_lossless
        return KEYFRAME not in self.recording.programs

    def _full_seconds(self, outcome: Outcome) -> float:
        return full_step_seconds(self.cell, self.counts, outcome)

    def _simulated_seconds(self) -> float | None:
        """Return the step time by the simulator; None if it does not know the variant."""
        variant, cell = self.variant, self.cell
        own = "stock-combined" if cell.workload.combines_qkv else "stock-separate"
        is_stock = variant.rule is not None and variant.rule.name in (STOCK, own)
        if not variant.split.fits(cell.topology) or not (is_stock or variant.mode in MODES):
            return None
        return estimate_step(cell.scenario, variant.split, SIMULATED_STOCK if is_stock else variant.mode).step_seconds


def predicted_row(recorded: RecordedVariant, quality: QualityRecord) -> dict[str, Any]:
    """Return the row of a variant that was not measured."""
    row = recorded.row(recorded.chosen_by_prediction(), quality)
    return {
        **row,
        "step_seconds": None,
        "exposed_seconds": row["predicted_seconds"] - row["compute_seconds"],
        **dict.fromkeys(("dilation_ratio", "prediction_ratio", "late_seconds", "idle_share", "bytes_ratio")),
        **dict.fromkeys(("dilation", "thinning", "repeated_runs")),
        "valid": None,
        "invalid_because": [],
    }


def measured_row(
    recorded: RecordedVariant, measured: MeasuredVariant, split: MeasuredSplit, quality: QualityRecord
) -> dict[str, Any]:
    """Return the row of a measured variant.

    Args:
        recorded: its recorded steps.
        measured: its measured steps.
        split: everything measured together with it.
        quality: PSNR of variants.
    """
    chosen = measurement.chosen_programs(measured)
    row = recorded.row(chosen, quality)
    seconds = measurement.step_seconds(measured)
    used = set(chosen.values())
    late = max(measured.programs[name].late_seconds / recorded.predictions[name].seconds for name in used)
    expected = {axis: size for axis, size in split.expected_bytes.items() if size}
    evidence = Evidence(
        dilation_ratio=measurement.slower_step_seconds(measured) / median(seconds),
        idle_share=split.idle_share,
        bytes_ratio={axis: split.moved_bytes.get(axis, 0.0) / size for axis, size in expected.items()},
        prediction_ratio=row["predicted_seconds"] / median(seconds),
        late_share=late,
    )
    objections = evidence.objections()
    return {
        **row,
        "step_seconds": seconds,
        "exposed_seconds": median(seconds) - row["compute_seconds"],
        "dilation_ratio": evidence.dilation_ratio,
        "prediction_ratio": evidence.prediction_ratio,
        "late_seconds": max(measured.programs[name].late_seconds for name in used),
        "repeated_runs": sum(measured.programs[name].num_repeated for name in used),
        "idle_share": evidence.idle_share,
        "bytes_ratio": dict(evidence.bytes_ratio),
        "valid": not objections,
        "invalid_because": objections,
    }


def recorded_variants(cell: Cell, recorded: RecordedSplit, variants: Sequence[Variant]) -> list[RecordedVariant]:
    """Return the variants of a split with their recorded steps."""
    return [RecordedVariant(cell, each, recorded.recordings[each.name], recorded.counts) for each in variants]


def worth_measuring(recorded: Sequence[RecordedVariant]) -> list[RecordedVariant]:
    """Return the variants of a cell without splits that are clearly slower than others.

    Of stock, splits that may be the fastest, and flat Ulysses; of a mode, the usual split and the fastest one.
    """
    fastest: dict[str, float] = {}
    for each in recorded:
        key = STOCK if each.variant.is_stock else each.variant.mode
        fastest[key] = min(fastest.get(key, math.inf), each.predicted_step_seconds)

    def is_worth_measuring(each: RecordedVariant) -> bool:
        seconds, variant = each.predicted_step_seconds, each.variant
        if variant.is_stock:
            return variant.name == STOCK or seconds <= _HOPELESS * fastest[STOCK]
        return not variant.is_other_split or seconds <= fastest[variant.mode]

    return [each for each in recorded if is_worth_measuring(each)]


def row_seconds(row: Mapping[str, Any]) -> float:
    """Return the step time of a row: the median of the measured ones, or else the predicted one."""
    measured: list[float] | None = row["step_seconds"]
    predicted: float = row["predicted_seconds"]
    return median(measured) if measured else predicted


def compare(rows: Sequence[dict[str, Any]], in_splits: Mapping[str, Collection[str]]) -> list[dict[str, Any]]:
    """Return the rows with their speedups, and the fastest row of stock, or of a mode, in its splits once more.

    Args:
        rows: one per variant, of which some may be stock.
        in_splits: variants of which the fastest one is the row of that name, such as BEST_STOCK.
    """
    stock = in_splits.get(BEST_STOCK, (STOCK,))
    best = {name: _fastest([row for row in rows if row["mode"] in names]) for name, names in in_splits.items()}
    ordered = [row for row in rows if row["mode"] in stock]
    ordered += [{**best[BEST_STOCK], "mode": BEST_STOCK}] if BEST_STOCK in best else []
    ordered += [row for row in rows if row["mode"] not in stock]
    ordered += [{**row, "mode": name} for name, row in best.items() if name != BEST_STOCK]
    compared = [dict(row) for row in ordered]
    set_speedups(compared)
    return compared


def set_speedups(rows: Sequence[dict[str, Any]]) -> None:
    """Set the speedups of rows over flat stock and over best stock among them; None without that one."""
    by_mode = {row["mode"]: row for row in rows}
    for row in rows:
        row["speedup"] = _speedup(by_mode.get(STOCK), row)
        row["speedup_over_best_stock"] = _speedup(by_mode.get(BEST_STOCK), row)


def _fastest(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fastest measured row, or the fastest predicted one if none was measured.

    A disturbed measurement may be that of the fastest: it counts by its prediction if that is shorter. An invalid
    baseline is no figure, and a valid but slower one would be a wrong figure.
    """

    def seconds(row: dict[str, Any]) -> float:
        measured = row_seconds(row)
        return min(measured, row["predicted_seconds"]) if row["valid"] is False else measured

    return min([row for row in rows if row["step_seconds"]] or rows, key=seconds)


def _speedup(baseline: Mapping[str, Any] | None, row: Mapping[str, Any]) -> float | None:
    return None if baseline is None else row_seconds(baseline) / row_seconds(row)
