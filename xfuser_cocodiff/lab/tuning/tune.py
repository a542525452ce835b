"""The search for bits: what is measured, what follows from it, and the check on what it was not measured on."""

import itertools
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import stdev
from typing import Any

from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.bit_allocation import LETTERS, NOT_SENT, BitAllocation, Bits
from xfuser_cocodiff.engine.compression.modes import FEW_STEPS
from xfuser_cocodiff.lab.tuning.rate_distortion import EXACT_BITS, Part, Rates, bits_of
from xfuser_cocodiff.lab.tuning.trial_cache import Trial, Trials

MOST_GROUPS = 5
"""Of layers that follow each other, which share their bits."""
MOST_PHASES = 4
"""Of a run."""
EDGE = 0.15
"""Of a run: its first and its last phase, where errors show most in some models; the others share the rest."""
FIRST_BITS = 8
TUNED = "tuned"
"""What a schedule is called beside modes."""
_NEAR = 0.3
"""Decibels within which a target is met."""
_MOST_TRIES = 3
RUNS = 1 + 5 + len(LETTERS) + MOST_PHASES + MOST_GROUPS + _MOST_TRIES
"""At most, until there is an answer."""
CHECKS = 4
"""Runs on what is held out: exact, tuned and two modes."""


@dataclass(frozen=True)
class Target:
    """One of the two."""

    decibels: float | None = None
    fraction: float | None = None
    """Of exact bytes, the first step included."""


@dataclass(frozen=True)
class Tuned:
    """What was found."""

    allotment: BitAllocation
    rates: Rates
    uniform: Sequence[Trial]
    """All in as many bits, on what it was tuned on."""
    tried: Trial
    """On what it was tuned on."""
    fraction: float
    """Of the exact bytes."""
    checked: Mapping[str, Trial]
    """On what it was not: the schedule as `tuned`, and modes."""
    predicted_db: float

    def record(self) -> dict[str, Any]:
        """For its file: the schedule, with its evidence."""
        rates = {**asdict(self.rates), "values": [[*part, value] for part, value in self.rates.values.items()]}
        others = {name: figures(trial) for name, trial in self.checked.items()}
        evidence = {
            **figures(self.tried, self.fraction),
            "predicted_db": self.predicted_db,
            "uniform": [figures(trial) for trial in self.uniform],
            "rates": rates,
        }
        held_out = {**figures(self.checked[TUNED], self.fraction), "modes": others}
        del others[TUNED]
        return {**self.allotment.to_json(), "evidence": evidence, "held_out": held_out}


def figures(trial: Trial, fraction: float | None = None) -> dict[str, Any]:
    """Of a trial, by the names that records have for them.

    Args:
        trial: which.
        fraction: of the bytes, where that is known better.
    """
    return {
        "bytes_slow_fraction": trial.fraction if fraction is None else fraction,
        "psnr_db_mean": trial.decibels,
        "psnr_db_sd": stdev(trial.psnr_db) if len(trial.psnr_db) > 1 else None,
        "ssim_mean": trial.ssim,
        "lpips_mean": trial.lpips,
    }


class Tuner:
    """Measures a model and allots bits.

    Args:
        trials: of the model.
        model: its name.
        steps: of a run.
        say: tells the user.
    """

    def __init__(self, trials: Trials, model: str, steps: int, say: Callable[[str], object]) -> None:
        self._trials, self._model, self._steps, self._say = trials, model, steps, say
        self._starts = starts(steps)
        self._probed: float = 2.7 if steps <= FEW_STEPS else 1.6
        self._predictor = modes.BALANCED_FEW.predictor if steps <= FEW_STEPS else modes.BALANCED.predictor

    def tune(self, target: Target) -> Tuned:
        """Find the bits that meet a target.

        Raises:
            ValueError: no bits do.
        """
        rates, uniform = self._rates()
        first = uniform[0].step_fractions[0]
        self._check(target, rates, first)
        bias, missing = 0.0, 0.0
        for _ in range(_MOST_TRIES):
            parts = rates.allot(**self._limits(target, bias, first))
            predicted = _decibels(rates.error(parts))
            allotment = self._allotment(parts)
            tried = self._trials.allotted(f"try {_in_words(allotment)}", allotment)
            fraction = self._fraction(rates, first, parts)
            self._say(f"{fraction:.3f} of the bytes, {tried.decibels:.1f} dB (expected {predicted:.1f})")
            missing = 0.0 if target.decibels is None else target.decibels - tried.decibels
            if target.decibels is None or -2 * _NEAR <= missing <= 0 or set(parts.values()) == {None}:
                break
            bias += missing + _NEAR
        if target.decibels is not None and missing > _NEAR:
            raise ValueError(
                f"--psnr {target.decibels:g} was not met: {tried.decibels:.1f} dB came of {_MOST_TRIES} tries"
            )
        return Tuned(allotment, rates, uniform, tried, fraction, self._checked(allotment), predicted)

    def _fraction(self, rates: Rates, first: float, parts: Mapping[Part, Bits]) -> float:
        """Of the exact bytes of a run."""
        return (first + (self._steps - 1) * rates.fraction(parts)) / self._steps

    def _check(self, target: Target, rates: Rates, first: float) -> None:
        least = first / self._steps
        if target.fraction is not None and target.fraction < least:
            raise ValueError(f"--bytes {target.fraction:g} is not valid: {self._steps} steps take {least:.3f} at least")

    def _limits(self, target: Target, bias: float, first: float) -> dict[str, float]:
        """Of what comes after the first step."""
        if target.fraction is None:
            return {"at_most": 10 ** (-((target.decibels or 0.0) + bias) / 10)}
        return {"within": (target.fraction * self._steps - first) / (self._steps - 1)}

    def _rates(self) -> tuple[Rates, list[Trial]]:
        """What errors do in each part of a run; and the runs in which all was coded in as many bits."""
        whole = {bits: self._uniform(bits) for bits in sorted({1, 2, 4, self._probed})}
        nothing = self._alone("nothing but the first step", bits=NOT_SENT, first=FIRST_BITS)
        letters = [self._alone(f"only {letter.upper()}", letters=letter) for letter in LETTERS]
        phases = [self._alone(f"only phase {phase + 1}", phase=phase) for phase in range(len(self._starts))]
        count = len(self._groups)
        groups = [
            self._alone(f"only layers {place + 1} of {count}", layers=group) for place, group in enumerate(self._groups)
        ]
        of = [
            _shares([self._trials.exact_fraction - trial.later_fraction for trial in trials])
            for trials in (groups, letters, phases)
        ]
        values = {
            Part(group, letter, phase): of[0][group] * of[1][place] * of[2][phase]
            for group in range(count)
            for place, letter in enumerate(LETTERS)
            for phase in range(len(self._starts))
        }
        probed = whole[self._probed]
        rates = Rates(
            self._probed,
            {NOT_SENT: nothing.error, **{bits: trial.error for bits, trial in whole.items()}},
            [trial.error for trial in groups],
            {letter: trial.error for letter, trial in zip(LETTERS, letters, strict=True)},
            [trial.error for trial in phases],
            values,
            EXACT_BITS * probed.later_fraction - bits_of(self._probed),
        )
        return rates, list(whole.values())

    @property
    def _groups(self) -> list[list[str]]:
        """Of layers, which are known once a run has been coded."""
        return split(self._trials.layers, MOST_GROUPS)

    def _uniform(self, bits: float) -> Trial:
        return self._trials.mode("balanced", schedule=f"first={FIRST_BITS},bits={bits:g},bits_o={bits:g}")

    def _alone(
        self,
        name: str,
        layers: Sequence[str] | None = None,
        letters: str = LETTERS,
        phase: int | None = None,
        bits: Bits = None,
        first: Bits = None,
    ) -> Trial:
        """A run in which all is exact but a part, which has some bits, those that are probed if none are given."""
        chosen = self._trials.layers if layers is None else layers
        coded = self._probed if bits is None else bits
        by_layer: dict[str, dict[str, tuple[Bits, ...]]] = {
            layer: {
                letter: tuple(
                    coded if layer in chosen and letter in letters and phase in (None, at) else None
                    for at in range(len(self._starts))
                )
                for letter in LETTERS
            }
            for layer in self._trials.layers
        }
        return self._trials.allotted(name, BitAllocation(self._starts, by_layer, first, self._predictor, self._steps))

    def _allotment(self, parts: Mapping[Part, Bits]) -> BitAllocation:
        bits = {
            layer: {
                letter: tuple(parts[Part(place, letter, phase)] for phase in range(len(self._starts)))
                for letter in LETTERS
            }
            for place, group in enumerate(self._groups)
            for layer in group
        }
        return BitAllocation(self._starts, bits, FIRST_BITS, self._predictor, self._steps, self._model)

    def _checked(self, allotment: BitAllocation) -> dict[str, Trial]:
        tuned = self._trials.allotted(f"tuned {_in_words(allotment)}", allotment, held_out=True)
        return {TUNED: tuned, **{mode: self._trials.mode(mode, held_out=True) for mode in ("balanced", "fast")}}


def starts(steps: int) -> tuple[float, ...]:
    """Where phases of a run begin: as many as there are steps behind the first, at most."""
    count = min(MOST_PHASES, steps - 1)
    if count < MOST_PHASES:
        return tuple(place / count for place in range(count))
    inner = MOST_PHASES - 2
    return (0.0, *(EDGE + place * (1 - 2 * EDGE) / inner for place in range(inner)), 1 - EDGE)


def split(layers: Sequence[str], most: int) -> list[list[str]]:
    """Layers that follow each other, in groups of about as many."""
    count = min(most, len(layers))
    edges = [round(place * len(layers) / count) for place in range(count + 1)]
    return [list(layers[first:last]) for first, last in itertools.pairwise(edges)]


def _shares(sizes: Sequence[float]) -> list[float]:
    return [size / sum(sizes) for size in sizes]


def _decibels(error: float) -> float:
    return -10 * math.log10(max(error, 1e-15))


def _in_words(allotment: BitAllocation) -> str:
    """What tells it from others."""
    return f"{zlib.crc32(json.dumps(allotment.to_json()).encode()):08x}"
