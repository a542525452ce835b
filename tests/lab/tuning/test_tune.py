"""The search for a bit allocation, on a model with known errors."""

import itertools
import math
from collections.abc import Mapping

import pytest

from xfuser_cocodiff.engine.compression.bit_allocation import LETTERS, NOT_SENT, BitAllocation
from xfuser_cocodiff.engine.kernels.quantize import GRIDS
from xfuser_cocodiff.lab.tuning.rate_distortion import stored_bits
from xfuser_cocodiff.lab.tuning.trial_cache import BitTrial
from xfuser_cocodiff.lab.tuning.tune import HELD_OUT_RUNS, MAX_RUNS, Tuner, TuningTarget, phase_starts, split_layers

STEPS = 20
LAYERS = [f"blocks.{number}" for number in range(10)]
LAYER_WEIGHTS = [1.0] * 4 + [8.0] * 2 + [2.0] * 4
TENSOR_WEIGHTS = {"q": 0.3, "k": 3.0, "v": 2.0, "o": 3.0}


def bits_per_value(bits: float | None) -> float:
    """Return the bits per value without metadata."""
    return 16 if bits is None else bits and stored_bits(bits)


def error_at(bits: float | None) -> float:
    return 0.0 if bits is None else 1e-2 * 10 ** (-0.62 * bits_per_value(bits))


class SyntheticTrials:
    """Replacement of TrialCache: the error is a weighted sum over layers, tensors and steps; early steps weigh more."""

    exact_fraction = 1.0
    layers = LAYERS

    def __init__(
        self, lost_db: float = 0.0, sent: str = LETTERS, lost_by_joint: Mapping[float | None, float] | None = None
    ) -> None:
        self.runs: list[str] = []
        self.allocations: list[BitAllocation] = []
        self._lost_db, self._sent = lost_db, sent
        self._lost_by_joint = lost_by_joint or {}

    def run_mode(self, mode: str, held_out: bool = False, schedule: str | None = None) -> BitTrial:
        changes = dict(pair.split("=") for pair in schedule.split(",")) if schedule else {}
        bits, joint = float(changes.get("bits", 2)), float(changes.get("joint", 1))
        lost_db = self._lost_by_joint.get(joint, 0.0)
        return self._trial(f"{mode} {bits} {joint}", lambda *_: bits, 8, held_out, lost_db)

    def run_allocation(self, name: str, allocation: BitAllocation, held_out: bool = False) -> BitTrial:
        self.allocations.append(allocation)
        lost_db = self._lost_db if name.startswith(("try", "tuned")) else 0.0
        lost_db += self._lost_by_joint.get(allocation.joint, 0.0)

        def bits_at(layer: str, letter: str, done: float) -> float | None:
            return allocation.bits(layer, done)[letter]

        return self._trial(name, bits_at, allocation.first, held_out, lost_db)

    def _trial(self, name: str, bits_at, first: float | None, held_out: bool, lost_db: float = 0.0) -> BitTrial:
        self.runs.append(f"{name} {held_out}")
        total_weight = sum(LAYER_WEIGHTS) * sum(TENSOR_WEIGHTS.values()) * sum(map(self._weight, range(1, STEPS)))
        error, fractions = 1e-12, [1.0 if first is None else 8.1 / 16]
        for step in range(1, STEPS):
            sizes = []
            for (index, layer), letter in itertools.product(enumerate(LAYERS), self._sent):
                bits = bits_at(layer, letter, step / (STEPS - 1))
                error += (
                    LAYER_WEIGHTS[index] * TENSOR_WEIGHTS[letter] * self._weight(step) * error_at(bits) / total_weight
                )
                sizes.append(bits_per_value(bits) + (0.1 if bits else 0.0))
            fractions.append(sum(sizes) / len(sizes) / 16)
        decibels = -10 * math.log10(error) - lost_db
        return BitTrial((decibels, decibels), 0.99, None, tuple(fractions))

    @staticmethod
    def _weight(step: int) -> float:
        return 5.0 if step / (STEPS - 1) < 0.15 else 1.0


def make_tuner(trials: SyntheticTrials) -> Tuner:
    return Tuner(trials, "model", STEPS, lambda message: None)


@pytest.mark.parametrize("fraction", [0.12, 0.15, 0.25])
def test_byte_budget_goes_to_layers_with_large_errors(fraction: float) -> None:
    trials = SyntheticTrials()
    result = make_tuner(trials).tune(TuningTarget(bytes_fraction=fraction))
    assert fraction - 0.02 < result.bytes_fraction <= fraction + 1e-9
    assert result.tuned.bytes_fraction == pytest.approx(result.bytes_fraction, rel=1e-3)
    assert result.predicted_psnr_db == pytest.approx(result.tuned.mean_psnr_db, abs=0.5)
    # It is better than the best uniform allocation with as many bytes.
    uniform = max(bits for bits in GRIDS if (stored_bits(bits) + 0.1) / 16 <= result.bytes_fraction)
    assert result.tuned.mean_psnr_db > trials.run_mode("balanced", schedule=f"bits={uniform}").mean_psnr_db + 1
    bits = result.allocation.layers
    assert bits_per_value(bits["blocks.4"]["k"][0]) > bits_per_value(bits["blocks.0"]["q"][2])
    assert len([run for run in trials.runs if run.endswith("False")]) - 1 <= MAX_RUNS
    assert len([run for run in trials.runs if run.endswith("True")]) <= HELD_OUT_RUNS


@pytest.mark.parametrize("lost_db", [0.0, 2.5, -2.5])
def test_psnr_target_is_met_despite_wrong_predictions(lost_db: float) -> None:
    result = make_tuner(SyntheticTrials(lost_db)).tune(TuningTarget(psnr_db=40))
    assert 40 - 0.3 <= result.tuned.mean_psnr_db < 41.5
    assert result.held_out["tuned"].mean_psnr_db == pytest.approx(result.tuned.mean_psnr_db)
    assert {*result.held_out} == {"tuned", "balanced", "fast"}


@pytest.mark.parametrize(
    ("lost_by_joint", "joint"),
    [
        ({}, None),
        ({0.0: 4.0, 1.25: 0.5}, 1.0),
        ({0.0: 4.0, 1.25: -2.0}, 1.25),
        ({0.0: -3.0, 1.25: 1.0}, 0.0),
        ({0.0: 4.0, 0.75: -1.0, 1.25: 0.8}, 0.75),
        ({0.0: 4.0, 1.25: -0.2}, 1.0),  # below the tolerance
    ],
)
def test_branches_of_guidance_have_the_best_weight(lost_by_joint: dict[float, float], joint: float | None) -> None:
    """Without guidance the weight has no effect, and files leave it to the mode."""
    trials = SyntheticTrials(lost_by_joint=lost_by_joint)
    result = make_tuner(trials).tune(TuningTarget(bytes_fraction=0.15))
    assert result.allocation.joint == joint
    assert {each.joint for each in trials.allocations} == {joint}, "all measurements have the weight of the result"
    assert len([run for run in trials.runs if run.endswith("False")]) <= MAX_RUNS


@pytest.mark.parametrize(("joint", "predictor"), [(None, 0.5), (1.0, "auto")])
def test_files_have_the_prediction_of_the_mode(joint: float | None, predictor: float | str) -> None:
    """`balanced` predicts otherwise in short runs with guidance."""
    trials = SyntheticTrials(lost_by_joint={0.0: 2.0} if joint else {})
    result = Tuner(trials, "model", 8, lambda message: None).tune(TuningTarget(bytes_fraction=0.25))
    assert (result.allocation.joint, result.allocation.predictor) == (joint, predictor)


def test_unimportant_values_are_not_sent_with_few_bytes() -> None:
    bits = make_tuner(SyntheticTrials()).tune(TuningTarget(bytes_fraction=0.06)).allocation.layers
    assert bits["blocks.0"]["q"][2] == NOT_SENT < bits["blocks.4"]["k"][0]


def test_tensors_that_are_not_sent_get_bits_for_runs_that_send_them() -> None:
    """Where K and V are gathered, only they are sent; a file is valid for runs that send Q and O too."""
    result = make_tuner(SyntheticTrials(sent="kv")).tune(TuningTarget(bytes_fraction=0.12))
    assert 0.1 < result.bytes_fraction <= 0.12 + 1e-9
    layers = result.allocation.layers.values()
    assert {of["q"] for of in layers} == {(1.6,) * 4} and {of["o"] for of in layers} == {(2.7,) * 4}
    assert len({bits for of in layers for letter in "kv" for bits in of[letter]}) > 1
    with pytest.raises(ValueError, match=r"--psnr 140 was not reached: 90\.0 dB"):
        make_tuner(SyntheticTrials(30.0, sent="kv")).tune(TuningTarget(psnr_db=140))


def test_unreachable_targets_raise() -> None:
    with pytest.raises(ValueError, match=r"--bytes 0.02 is not valid: 20 steps need at least 0.0\d+"):
        make_tuner(SyntheticTrials()).tune(TuningTarget(bytes_fraction=0.02))
    with pytest.raises(ValueError, match=r"--psnr 140 was not reached: 90\.0 dB"):
        make_tuner(SyntheticTrials(30.0)).tune(TuningTarget(psnr_db=140))


def test_phases_and_groups_cover_a_run() -> None:
    assert phase_starts(50) == pytest.approx((0.0, 0.15, 0.5, 0.85)) and phase_starts(3) == (0.0, 0.5)
    for count in range(1, 60):
        layers = [str(number) for number in range(count)]
        groups = split_layers(layers, 5)
        assert list(itertools.chain.from_iterable(groups)) == layers
        assert len(groups) == min(5, count)
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
