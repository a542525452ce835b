"""The choice of bits, against all choices there are, and against what it says of itself."""

import itertools

import pytest

from xfuser_cocodiff.engine.compression.bit_allocation import LETTERS, NOT_SENT
from xfuser_cocodiff.engine.kernels.quantize import GRIDS
from xfuser_cocodiff.lab.tuning.rate_distortion import Part, Rates, bits_of

ERRORS = {NOT_SENT: 2e-2, 1: 1e-3, 1.6: 3e-4, 2: 1e-4, 4: 1e-6}


def rates_of(groups: list[float], letters: dict[str, float], phases: list[float], overhead: float = 0.1) -> Rates:
    parts = [Part(*each) for each in itertools.product(range(len(groups)), letters, range(len(phases)))]
    values = {part: (1 + part.phase) * (2 if part.letter == "q" else 1) for part in parts}
    whole = sum(values.values())
    return Rates(1.6, ERRORS, groups, letters, phases, {part: size / whole for part, size in values.items()}, overhead)


RATES = rates_of([1.0, 5.0, 2.0], {"q": 0.5, "k": 3.0, "v": 2.0, "o": 3.0}, [4.0, 1.0, 1.0])


@pytest.mark.parametrize("bits", sorted(GRIDS))
def test_as_many_bits_everywhere_make_what_was_measured(bits: float) -> None:
    everywhere = dict.fromkeys(RATES.values, bits)
    assert RATES.error(everywhere) == pytest.approx(RATES.error_at(bits))
    assert RATES.fraction(everywhere) == pytest.approx((bits_of(bits) + 0.1) / 16)


def test_errors_between_and_beyond_what_was_measured() -> None:
    assert [RATES.error_at(bits) for bits in ERRORS if bits] == pytest.approx(list(ERRORS.values())[1:])
    assert RATES.error_at(None) == 0
    assert ERRORS[4] < RATES.error_at(2.7) < ERRORS[2]
    assert RATES.error_at(8) == pytest.approx(ERRORS[4] * 10 ** (-4 * 6.02 / 10))


@pytest.mark.parametrize("within", [0.1, 0.12, 0.2, 0.5, 1.0])
def test_bytes_are_kept_and_used(within: float) -> None:
    found = RATES.allot(within=within)
    largest = max(RATES.values.values()) / 16  # a step that no longer fits costs at most so much for each bit
    assert within - 8 * largest < RATES.fraction(found) <= within + 1e-9
    more = RATES.allot(within=1.2 * within)
    assert RATES.error(more) <= RATES.error(found)


@pytest.mark.parametrize("at_most", [1e-3, 1e-4, 1e-5, 1e-9])
def test_an_error_is_met_by_no_more_than_it_takes(at_most: float) -> None:
    found = RATES.allot(at_most=at_most)
    assert RATES.error(found) <= at_most
    same_bytes = RATES.allot(within=RATES.fraction(found))
    assert RATES.error(same_bytes) <= 1.1 * RATES.error(found)


def test_it_comes_near_to_the_best_of_all_choices() -> None:
    small = rates_of([1.0, 6.0], {"q": 0.5, "k": 3.0}, [1.0])
    choices = (NOT_SENT, *GRIDS, None)
    every = [dict(zip(small.values, bits, strict=True)) for bits in itertools.product(choices, repeat=4)]
    for within in (0.12, 0.15, 0.2, 0.25):
        best = min((one for one in every if small.fraction(one) <= within), key=small.error)
        found = small.allot(within=within)
        assert small.error(found) <= 1.4 * small.error(best), within
        # Far from what as many bits everywhere would make.
        uniform = min(small.error(dict.fromkeys(small.values, b)) for b in GRIDS if (bits_of(b) + 0.1) / 16 <= within)
        assert small.error(found) < uniform


def test_what_is_not_sent_takes_nothing() -> None:
    assert RATES.size(NOT_SENT) == 0 and RATES.error_at(NOT_SENT) > ERRORS[NOT_SENT]
    hardly = rates_of([1.0, 1e-6], {"q": 1.0, "k": 1.0}, [1.0])
    found = hardly.allot(within=0.09)
    assert {bits for part, bits in found.items() if part.group} == {NOT_SENT} != {found[Part(0, "k", 0)]}


def size_of(bits: float | None) -> float:
    return 16 if bits is None else bits


def test_what_hurts_more_gets_more() -> None:
    found = RATES.allot(within=0.15)
    for part, other in itertools.permutations(RATES.values, 2):
        if RATES.share(part) > RATES.share(other) and RATES.values[part] <= RATES.values[other]:
            assert size_of(found[part]) >= size_of(found[other]), (part, other)
    assert {part.letter for part in found} == {*LETTERS}
