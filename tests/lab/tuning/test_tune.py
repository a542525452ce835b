"""The search, on a model whose errors are known."""

import itertools
import math

import pytest

from xfuser_cocodiff.engine.compression.bit_allocation import LETTERS, NOT_SENT, BitAllocation
from xfuser_cocodiff.engine.kernels.quantize import GRIDS
from xfuser_cocodiff.lab.tuning.rate_distortion import bits_of
from xfuser_cocodiff.lab.tuning.trial_cache import Trial
from xfuser_cocodiff.lab.tuning.tune import CHECKS, RUNS, Target, Tuner, split, starts

STEPS = 20
LAYERS = [f"blocks.{number}" for number in range(10)]
OF_LAYERS = [1.0] * 4 + [8.0] * 2 + [2.0] * 4
OF_LETTERS = {"q": 0.3, "k": 3.0, "v": 2.0, "o": 3.0}


def size_of(bits: float | None) -> float:
    """Without what is sent beside it."""
    return 16 if bits is None else bits and bits_of(bits)


def error_at(bits: float | None) -> float:
    return 0.0 if bits is None else 1e-2 * 10 ** (-0.62 * size_of(bits))


class Known:
    """Stands for trials: an error is a sum over layers, tensors and steps, those of the first steps weighing most."""

    exact_fraction = 1.0
    layers = LAYERS

    def __init__(self, off: float = 0.0) -> None:
        self.runs: list[str] = []
        self._off = off

    def mode(self, mode: str, held_out: bool = False, schedule: str | None = None) -> Trial:
        bits = float(schedule.rpartition("=")[2]) if schedule else 2
        return self._trial(f"{mode} {bits}", lambda *_: bits, 8, held_out)

    def allotted(self, name: str, bits: BitAllocation, held_out: bool = False) -> Trial:
        off = self._off if name.startswith(("try", "tuned")) else 0.0
        return self._trial(name, lambda layer, letter, done: bits.bits(layer, done)[letter], bits.first, held_out, off)

    def _trial(self, name: str, bits_at, first: float | None, held_out: bool, off: float = 0.0) -> Trial:
        self.runs.append(f"{name} {held_out}")
        whole = sum(OF_LAYERS) * sum(OF_LETTERS.values()) * sum(map(self._weight, range(1, STEPS)))
        error, fractions = 1e-12, [1.0 if first is None else 8.1 / 16]
        for step in range(1, STEPS):
            sizes = []
            for (place, layer), letter in itertools.product(enumerate(LAYERS), LETTERS):
                bits = bits_at(layer, letter, step / (STEPS - 1))
                error += OF_LAYERS[place] * OF_LETTERS[letter] * self._weight(step) * error_at(bits) / whole
                sizes.append(size_of(bits) + (0.1 if bits else 0.0))
            fractions.append(sum(sizes) / len(sizes) / 16)
        decibels = -10 * math.log10(error) - off
        return Trial((decibels, decibels), 0.99, None, tuple(fractions))

    @staticmethod
    def _weight(step: int) -> float:
        return 5.0 if step / (STEPS - 1) < 0.15 else 1.0


def tuner(trials: Known) -> Tuner:
    return Tuner(trials, "model", STEPS, lambda message: None)


@pytest.mark.parametrize("fraction", [0.12, 0.15, 0.25])
def test_bytes_are_spent_where_errors_matter(fraction: float) -> None:
    trials = Known()
    tuned = tuner(trials).tune(Target(fraction=fraction))
    assert fraction - 0.02 < tuned.fraction <= fraction + 1e-9
    assert tuned.tried.fraction == pytest.approx(tuned.fraction, rel=1e-3)
    assert tuned.predicted_db == pytest.approx(tuned.tried.decibels, abs=0.5)
    # No choice of as many bits everywhere that costs no more comes near.
    uniform = max(bits for bits in GRIDS if (bits_of(bits) + 0.1) / 16 <= tuned.fraction)
    assert tuned.tried.decibels > trials.mode("balanced", schedule=f"bits={uniform}").decibels + 1
    bits = tuned.allotment.layers
    assert size_of(bits["blocks.4"]["k"][0]) > size_of(bits["blocks.0"]["q"][2])
    assert len([run for run in trials.runs if run.endswith("False")]) - 1 <= RUNS
    assert len([run for run in trials.runs if run.endswith("True")]) <= CHECKS


@pytest.mark.parametrize("off", [0.0, 2.5, -2.5])
def test_a_psnr_is_met_also_where_more_or_less_comes_than_was_foreseen(off: float) -> None:
    tuned = tuner(Known(off)).tune(Target(decibels=40))
    assert 40 - 0.3 <= tuned.tried.decibels < 41.5
    assert tuned.checked["tuned"].decibels == pytest.approx(tuned.tried.decibels)
    assert {*tuned.checked} == {"tuned", "balanced", "fast"}


def test_what_matters_least_is_not_sent_where_bytes_are_few() -> None:
    bits = tuner(Known()).tune(Target(fraction=0.06)).allotment.layers
    assert bits["blocks.0"]["q"][2] == NOT_SENT < bits["blocks.4"]["k"][0]


def test_targets_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--bytes 0.02 is not valid: 20 steps take 0.0\d+ at least"):
        tuner(Known()).tune(Target(fraction=0.02))
    with pytest.raises(ValueError, match=r"--psnr 140 was not met: 90\.0 dB"):
        tuner(Known(30.0)).tune(Target(decibels=140))


def test_phases_and_groups_cover_all() -> None:
    assert starts(50) == pytest.approx((0.0, 0.15, 0.5, 0.85)) and starts(3) == (0.0, 0.5)
    for count in range(1, 60):
        layers = [str(number) for number in range(count)]
        groups = split(layers, 5)
        assert list(itertools.chain.from_iterable(groups)) == layers
        assert len(groups) == min(5, count)
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
