"""The change per step that predictions assume, and the bits that rate control would choose for it."""

from dataclasses import replace
from statistics import fmean

import pytest

from xfuser_cocodiff.engine.codec.quantize import GRIDS
from xfuser_cocodiff.engine.compression.modes import BALANCED, FAST, CodecSchedule
from xfuser_cocodiff.engine.compression.rate_control import LEVELS
from xfuser_cocodiff.tools.simulation.assumed_change import PUBLISHED, bits_of, stretch


def errors_of(bits: list[float], changes: list[float]) -> list[float]:
    """Return the error of each step, whose residual has the step's change and the error of the step before."""
    errors = [GRIDS[bits[0]].distortion]
    for each, change in zip(bits[1:], changes, strict=True):
        errors.append(GRIDS[each].distortion * (change**2 + errors[-1] ** 2) ** 0.5)
    return errors


@pytest.mark.parametrize("schedule", [BALANCED, FAST, replace(BALANCED, error=0.05)], ids=str)
@pytest.mark.parametrize("steps", [8, 20, 28, 50])
def test_bits_reach_the_target_on_the_same_model(schedule: CodecSchedule, steps: int) -> None:
    bits = bits_of(schedule, steps)
    assert len(bits) == steps and bits[0] == schedule.first
    mean = fmean(errors_of(bits, stretch(PUBLISHED, steps)))
    assert mean <= 1.05 * schedule.error
    has_fewest = bits.count(LEVELS[0]) > steps / 2  # then less is not possible
    assert mean > 0.6 * schedule.error or has_fewest


def test_the_error_of_fp8_takes_about_four_bits_and_that_of_fp4_two() -> None:
    assert fmean(bits_of(BALANCED, 28)[1:]) == pytest.approx(4, abs=0.4)
    assert fmean(bits_of(FAST, 28)[1:]) == pytest.approx(2, abs=0.4)
    assert fmean(bits_of(BALANCED, 50)) < fmean(bits_of(BALANCED, 28)) < fmean(bits_of(BALANCED, 8))
