"""The search for a bit allocation: measurements of a model, candidates for a target, and runs on held-out prompts."""

import itertools
import json
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.bit_allocation import LETTERS, NOT_SENT, BitAllocation, Bits
from xfuser_cocodiff.engine.compression.modes import FEW_STEPS, CodecSchedule
from xfuser_cocodiff.lab.tuning.rate_distortion import (
    EXACT_BITS,
    Allocation,
    AllocationUnit,
    RateDistortion,
    stored_bits,
)
from xfuser_cocodiff.lab.tuning.trial_cache import BitTrial, TrialCache

MAX_GROUPS = 5
"""Largest number of layer groups; consecutive layers of a group have the same bits."""
MAX_PHASES = 4
"""Largest number of phases of a run."""
EDGE_FRACTION = 0.15
"""Length of the first and of the last phase, where errors matter most in some models, as a fraction of a run; the other
phases have equal lengths."""
FIRST_STEP_BITS = 8
TUNED = "tuned"
"""Name of the tuned schedule in a table beside modes."""
_TOLERANCE_DB = 0.3
"""Largest distance to a PSNR target at which it counts as met."""
_LEAST_FRACTION = 0.01
"""Fraction of all values above which a tensor counts as sent; metadata of lossless values takes less than that."""
_MAX_TRIES = 3
_JOINT = 1.0
"""Weight of the leading branch of guidance in modes; others must gain more than the tolerance."""
_OTHER_JOINT = (0.0, 0.75, 1.25)
"""Weights that are tried in place of it: none, which codes branches by themselves, one for branches that differ more,
and one that cancels errors of the leading branch at a guidance scale of 5."""
MAX_RUNS = 1 + 5 + len(_OTHER_JOINT) + len(LETTERS) + MAX_PHASES + MAX_GROUPS + _MAX_TRIES
"""Largest number of runs before the held-out runs."""
HELD_OUT_RUNS = 4
"""Runs on held-out prompts: exact, tuned and two modes."""


@dataclass(frozen=True)
class TuningTarget:
    """Target of a search: either a PSNR to reach or a budget of bytes."""

    psnr_db: float | None = None
    bytes_fraction: float | None = None
    """Bytes of a run over lossless ones, first step included."""


@dataclass(frozen=True)
class TuningResult:
    """Tuned bit allocation with its evidence."""

    allocation: BitAllocation
    rate_distortion: RateDistortion
    uniform: Sequence[BitTrial]
    """Trials with the same bits everywhere, on the prompts to tune on."""
    tuned: BitTrial
    """Trial of the allocation, on the prompts to tune on."""
    bytes_fraction: float
    """Bytes of the allocation over the lossless ones."""
    held_out: Mapping[str, BitTrial]
    """Trials on held-out prompts: the allocation as `tuned`, and modes."""
    predicted_psnr_db: float

    def record(self) -> dict[str, Any]:
        """Return the content of the schedule file: the schedule with its evidence."""
        modes = {name: trial_metrics(trial) for name, trial in self.held_out.items() if name != TUNED}
        evidence = {
            **trial_metrics(self.tuned, self.bytes_fraction),
            "predicted_db": self.predicted_psnr_db,
            "uniform": [trial_metrics(trial) for trial in self.uniform],
            "rates": self.rate_distortion.to_json(),
        }
        held_out = {**trial_metrics(self.held_out[TUNED], self.bytes_fraction), "modes": modes}
        return {**self.allocation.to_json(), "evidence": evidence, "held_out": held_out}


def trial_metrics(trial: BitTrial, bytes_fraction: float | None = None) -> dict[str, Any]:
    """Return the metrics of a trial by their names in records.

    Args:
        trial: with the metrics.
        bytes_fraction: replaces the trial's own, if it is known more precisely.
    """
    return {
        "bytes_slow_fraction": trial.bytes_fraction if bytes_fraction is None else bytes_fraction,
        "psnr_db_mean": trial.mean_psnr_db,
        "psnr_db_sd": stdev(trial.psnr_db) if len(trial.psnr_db) > 1 else None,
        "ssim_mean": trial.ssim,
        "lpips_mean": trial.lpips,
    }


class Tuner:
    """Search for the bit allocation of a model.

    Args:
        trials: of the model.
        model: its name.
        steps: denoising steps of a run.
        report: called with a message for the user.
    """

    def __init__(self, trials: TrialCache, model: str, steps: int, report: Callable[[str], object]) -> None:
        self._trials, self._model, self._steps, self._report = trials, model, steps, report
        self._starts = phase_starts(steps)
        self._probe_bits: float = 2.7 if steps <= FEW_STEPS else 1.6
        self._joint: float | None = None
        """Weight of the leading branch of guidance; None without guidance, and before it is known."""

    @property
    def _mode(self) -> CodecSchedule:
        """Schedule of `balanced`, whose prediction the allocation has."""
        return modes.preset("balanced", self._steps, is_guided=self._joint is not None) or CodecSchedule()

    def tune(self, target: TuningTarget) -> TuningResult:
        """Search for the allocation that meets a target.

        For a PSNR target, up to three candidates are tried; each corrects the prediction by the PSNR of the one before.

        Raises:
            ValueError: the target cannot be met.
        """
        model, uniform = self._measure()
        first_step = uniform[0].step_fractions[0]
        self._check_budget(target, first_step)
        correction, missing = 0.0, 0.0
        for _ in range(_MAX_TRIES):
            units = model.allocate(**self._limits(target, correction, first_step))
            predicted = _to_psnr_db(model.predict_error(units))
            allocation = self._to_bit_allocation(units, model.sent_tensors(_LEAST_FRACTION))
            tuned = self._trials.run_allocation(f"try {_checksum(allocation)}", allocation)
            fraction = (first_step + (self._steps - 1) * model.bytes_fraction(units)) / self._steps
            self._report(f"{fraction:.3f} of lossless bytes, {tuned.mean_psnr_db:.1f} dB (predicted {predicted:.1f})")
            missing = 0.0 if target.psnr_db is None else target.psnr_db - tuned.mean_psnr_db
            is_exact = {bits for unit, bits in units.items() if model.value_fractions[unit] > 0} == {None}
            if target.psnr_db is None or -2 * _TOLERANCE_DB <= missing <= 0 or is_exact:
                break
            correction += missing + _TOLERANCE_DB
        if target.psnr_db is not None and missing > _TOLERANCE_DB:
            raise ValueError(
                f"--psnr {target.psnr_db:g} was not reached: {tuned.mean_psnr_db:.1f} dB after {_MAX_TRIES} tries"
            )
        return TuningResult(allocation, model, uniform, tuned, fraction, self._run_held_out(allocation), predicted)

    def _check_budget(self, target: TuningTarget, first_step: float) -> None:
        least = first_step / self._steps
        if target.bytes_fraction is not None and target.bytes_fraction < least:
            raise ValueError(
                f"--bytes {target.bytes_fraction:g} is not valid: {self._steps} steps need at least {least:.3f}, since "
                "the first step is always sent"
            )

    def _limits(self, target: TuningTarget, correction: float, first_step: float) -> dict[str, float]:
        """Return the arguments of :meth:`RateDistortion.allocate`, which covers the steps after the first."""
        if target.bytes_fraction is None:
            return {"max_error": 10 ** (-((target.psnr_db or 0.0) + correction) / 10)}
        return {"max_bytes": (target.bytes_fraction * self._steps - first_step) / (self._steps - 1)}

    def _measure(self) -> tuple[RateDistortion, list[BitTrial]]:
        """Run the model with the same bits everywhere, and with a single group, tensor or phase compressed.

        Returns:
            The rate-distortion model, and the trials with the same bits everywhere.
        """
        self._joint = self._choose_joint()
        uniform = {bits: self._run_uniform(bits, self._joint) for bits in sorted({1, 2, 4, self._probe_bits})}
        nothing = self._run_part("nothing but the first step", bits=NOT_SENT, first=FIRST_STEP_BITS)
        tensors = [self._run_part(f"only {letter.upper()}", tensors=letter) for letter in LETTERS]
        phases = [self._run_part(f"only phase {phase + 1}", phase=phase) for phase in range(len(self._starts))]
        count = len(self._groups)
        groups = [
            self._run_part(f"only layers {index + 1} of {count}", layers=group)
            for index, group in enumerate(self._groups)
        ]
        probe = uniform[self._probe_bits]
        model = RateDistortion(
            self._probe_bits,
            {NOT_SENT: nothing.error, **{bits: trial.error for bits, trial in uniform.items()}},
            [trial.error for trial in groups],
            {letter: trial.error for letter, trial in zip(LETTERS, tensors, strict=True)},
            [trial.error for trial in phases],
            self._value_fractions(groups, tensors, phases),
            EXACT_BITS * probe.later_bytes_fraction - stored_bits(self._probe_bits),
        )
        return model, list(uniform.values())

    def _value_fractions(
        self, groups: Sequence[BitTrial], tensors: Sequence[BitTrial], phases: Sequence[BitTrial]
    ) -> dict[AllocationUnit, float]:
        """Return the fraction of all values in each unit, from the bytes that each trial saved."""
        by_group, by_tensor, by_phase = (
            _normalize([self._trials.exact_fraction - trial.later_bytes_fraction for trial in trials])
            for trials in (groups, tensors, phases)
        )
        return {
            AllocationUnit(group, letter, phase): by_group[group] * by_tensor[index] * by_phase[phase]
            for group in range(len(groups))
            for index, letter in enumerate(LETTERS)
            for phase in range(len(phases))
        }

    @property
    def _groups(self) -> list[list[str]]:
        """Layer groups; known after the first trial."""
        return split_layers(self._trials.layers, MAX_GROUPS)

    def _choose_joint(self) -> float | None:
        """Return the weight of the leading branch with the highest PSNR; None if the model has no guidance.

        Without guidance the weight has no effect.
        """
        by_default = self._run_uniform(self._probe_bits, _JOINT)
        if self._run_uniform(self._probe_bits, 0.0).psnr_db == by_default.psnr_db:
            return None
        best, best_psnr = _JOINT, by_default.mean_psnr_db + _TOLERANCE_DB
        for joint in _OTHER_JOINT:
            psnr = self._run_uniform(self._probe_bits, joint).mean_psnr_db
            if psnr > best_psnr:
                best, best_psnr = joint, psnr
        self._report(f"branches of guidance: joint={best:g}")
        return best

    def _run_uniform(self, bits: float, joint: float | None) -> BitTrial:
        changes = "" if joint in (None, _JOINT) else f",joint={joint:g}"
        schedule = f"first={FIRST_STEP_BITS},bits={bits:g},bits_o={bits:g}{changes}"
        return self._trials.run_mode("balanced", schedule=schedule)

    def _run_part(
        self,
        name: str,
        layers: Sequence[str] | None = None,
        tensors: str = LETTERS,
        phase: int | None = None,
        bits: Bits = None,
        first: Bits = None,
    ) -> BitTrial:
        """Run the model with a part of its values compressed and all others exact.

        Args:
            name: of the trial.
            layers: to compress; all if not given.
            tensors: letters of the tensors to compress.
            phase: to compress; all if not given.
            bits: of the compressed part; by default those of all such measurements.
            first: bits of the first step.
        """
        compressed_layers = self._trials.layers if layers is None else layers
        part_bits = self._probe_bits if bits is None else bits
        by_layer: dict[str, dict[str, tuple[Bits, ...]]] = {
            layer: {
                letter: tuple(
                    part_bits if layer in compressed_layers and letter in tensors and phase in (None, index) else None
                    for index in range(len(self._starts))
                )
                for letter in LETTERS
            }
            for layer in self._trials.layers
        }
        predictor = self._mode.predictor
        allocation = BitAllocation(self._starts, by_layer, first, predictor, self._steps, joint=self._joint)
        return self._trials.run_allocation(name, allocation)

    def _to_bit_allocation(self, units: Allocation, sent: Collection[str]) -> BitAllocation:
        """Convert bits by unit to bits by layer, tensor and phase.

        Args:
            units: bits by unit.
            sent: letters of the tensors that the trials sent. The others, such as Q and O where K and V are gathered,
                get the bits of `balanced`, for runs that send them.
        """
        of_mode = self._mode.codecs(1, self._steps)
        bits = {
            layer: {
                letter: tuple(
                    units[AllocationUnit(index, letter, phase)] if letter in sent else of_mode[letter].bits
                    for phase in range(len(self._starts))
                )
                for letter in LETTERS
            }
            for index, group in enumerate(self._groups)
            for layer in group
        }
        predictor = self._mode.predictor
        return BitAllocation(
            self._starts, bits, FIRST_STEP_BITS, predictor, self._steps, self._model, joint=self._joint
        )

    def _run_held_out(self, allocation: BitAllocation) -> dict[str, BitTrial]:
        name = f"tuned {_checksum(allocation)}"
        tuned = self._trials.run_allocation(name, allocation, held_out=True)
        return {TUNED: tuned, **{mode: self._trials.run_mode(mode, held_out=True) for mode in ("balanced", "fast")}}


def phase_starts(steps: int) -> tuple[float, ...]:
    """Return where the phases of a run begin, as fractions of it; at most one phase per step after the first."""
    count = min(MAX_PHASES, steps - 1)
    if count < MAX_PHASES:
        return tuple(index / count for index in range(count))
    inner = MAX_PHASES - 2
    inner_length = (1 - 2 * EDGE_FRACTION) / inner
    return (0.0, *(EDGE_FRACTION + index * inner_length for index in range(inner)), 1 - EDGE_FRACTION)


def split_layers(layers: Sequence[str], max_groups: int) -> list[list[str]]:
    """Split layers into groups of consecutive ones, whose sizes differ by at most one."""
    count = min(max_groups, len(layers))
    edges = [round(index * len(layers) / count) for index in range(count + 1)]
    return [list(layers[first:last]) for first, last in itertools.pairwise(edges)]


def _normalize(sizes: Sequence[float]) -> list[float]:
    return [size / sum(sizes) for size in sizes]


def _to_psnr_db(error: float) -> float:
    return -10 * math.log10(max(error, 1e-15))


def _checksum(allocation: BitAllocation) -> str:
    """Return a checksum that identifies an allocation in the cache of trials."""
    return f"{zlib.crc32(json.dumps(allocation.to_json()).encode()):08x}"
