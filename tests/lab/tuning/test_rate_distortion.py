"""The rate-distortion model and its bit allocation, compared with an exhaustive search."""

import itertools

import pytest

from xfuser_cocodiff.engine.compression.bit_allocation import LETTERS, NOT_SENT
from xfuser_cocodiff.engine.kernels.quantize import GRIDS
from xfuser_cocodiff.lab.tuning.rate_distortion import AllocationUnit, RateDistortion, stored_bits

ERRORS = {NOT_SENT: 2e-2, 1: 1e-3, 1.6: 3e-4, 2: 1e-4, 4: 1e-6}


def make_model(
    groups: list[float], tensors: dict[str, float], phases: list[float], overhead: float = 0.1
) -> RateDistortion:
    units = [AllocationUnit(*each) for each in itertools.product(range(len(groups)), tensors, range(len(phases)))]
    values = {unit: (1 + unit.phase) * (2 if unit.tensor == "q" else 1) for unit in units}
    total = sum(values.values())
    fractions = {unit: count / total for unit, count in values.items()}
    return RateDistortion(1.6, ERRORS, groups, tensors, phases, fractions, overhead)


MODEL = make_model([1.0, 5.0, 2.0], {"q": 0.5, "k": 3.0, "v": 2.0, "o": 3.0}, [4.0, 1.0, 1.0])


@pytest.mark.parametrize("bits", sorted(GRIDS))
def test_uniform_allocation_has_the_measured_error(bits: float) -> None:
    uniform = dict.fromkeys(MODEL.value_fractions, bits)
    assert MODEL.predict_error(uniform) == pytest.approx(MODEL.uniform_error(bits))
    assert MODEL.bytes_fraction(uniform) == pytest.approx((stored_bits(bits) + 0.1) / 16)


def test_errors_are_interpolated_and_extrapolated() -> None:
    assert [MODEL.uniform_error(bits) for bits in ERRORS if bits] == pytest.approx(list(ERRORS.values())[1:])
    assert MODEL.uniform_error(None) == 0
    assert ERRORS[4] < MODEL.uniform_error(2.7) < ERRORS[2]
    assert MODEL.uniform_error(8) == pytest.approx(ERRORS[4] * 10 ** (-4 * 6.02 / 10))


@pytest.mark.parametrize("max_bytes", [0.1, 0.12, 0.2, 0.5, 1.0])
def test_byte_budget_is_used_and_not_exceeded(max_bytes: float) -> None:
    allocation = MODEL.allocate(max_bytes=max_bytes)
    largest = max(MODEL.value_fractions.values()) / 16  # cost of one more bit for the largest unit
    assert max_bytes - 8 * largest < MODEL.bytes_fraction(allocation) <= max_bytes + 1e-9
    more = MODEL.allocate(max_bytes=1.2 * max_bytes)
    assert MODEL.predict_error(more) <= MODEL.predict_error(allocation)


@pytest.mark.parametrize("max_error", [1e-3, 1e-4, 1e-5, 1e-9])
def test_error_target_is_met_with_few_bytes(max_error: float) -> None:
    allocation = MODEL.allocate(max_error=max_error)
    assert MODEL.predict_error(allocation) <= max_error
    same_bytes = MODEL.allocate(max_bytes=MODEL.bytes_fraction(allocation))
    assert MODEL.predict_error(same_bytes) <= 1.1 * MODEL.predict_error(allocation)


def test_allocation_is_close_to_an_exhaustive_search() -> None:
    small = make_model([1.0, 6.0], {"q": 0.5, "k": 3.0}, [1.0])
    choices = (NOT_SENT, *GRIDS, None)
    every = [dict(zip(small.value_fractions, bits, strict=True)) for bits in itertools.product(choices, repeat=4)]
    for max_bytes in (0.12, 0.15, 0.2, 0.25):
        best = min((each for each in every if small.bytes_fraction(each) <= max_bytes), key=small.predict_error)
        allocation = small.allocate(max_bytes=max_bytes)
        assert small.predict_error(allocation) <= 1.4 * small.predict_error(best), max_bytes
        # It is better than the best uniform allocation.
        affordable = [bits for bits in GRIDS if (stored_bits(bits) + 0.1) / 16 <= max_bytes]
        uniform = min(small.predict_error(dict.fromkeys(small.value_fractions, bits)) for bits in affordable)
        assert small.predict_error(allocation) < uniform


def test_units_that_are_not_sent_need_no_bytes() -> None:
    assert MODEL.sent_bits(NOT_SENT) == 0 and MODEL.uniform_error(NOT_SENT) > ERRORS[NOT_SENT]
    unequal = make_model([1.0, 1e-6], {"q": 1.0, "k": 1.0}, [1.0])
    allocation = unequal.allocate(max_bytes=0.09)
    assert (
        {bits for unit, bits in allocation.items() if unit.group}
        == {NOT_SENT}
        != {allocation[AllocationUnit(0, "k", 0)]}
    )


def sent_bits(bits: float | None) -> float:
    return 16 if bits is None else bits


def test_units_with_more_error_get_more_bits() -> None:
    allocation = MODEL.allocate(max_bytes=0.15)
    for unit, other in itertools.permutations(MODEL.value_fractions, 2):
        if (
            MODEL.error_fraction(unit) > MODEL.error_fraction(other)
            and MODEL.value_fractions[unit] <= MODEL.value_fractions[other]
        ):
            assert sent_bits(allocation[unit]) >= sent_bits(allocation[other]), (unit, other)
    assert {unit.tensor for unit in allocation} == {*LETTERS}
