"""What the quick set has of many cases: the others are marked slow, and run with `--all`."""

import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Any

import pytest


def slow(*case: Any) -> Any:
    """A case that the quick set leaves out, since another one tests the same behaviour."""
    return pytest.param(*case, marks=pytest.mark.slow)


def slow_but(quick: Collection, cases: Iterable) -> list:
    """All cases, of which these are quick."""
    cases = list(cases)
    assert all(case in cases for case in quick)
    return [case if case in quick else slow(*case) if isinstance(case, tuple) else slow(case) for case in cases]


def in_turn(cases: Iterable[tuple], values: Iterable) -> list:
    """All cases with each of these values behind them; a case is quick with one of them, the next with the next one."""
    cases, values = list(cases), list(values)
    quick = [(*case, value) for case, value in zip(cases, itertools.cycle(values), strict=False)]
    return slow_but(quick, [(*case, value) for case in cases for value in values])


def pairwise(cases: Iterable[tuple[Hashable, ...]]) -> list:
    """So few cases that every three values that stand in one case still meet, and every two in a quick one."""
    cases = list(cases)
    quick = list(covering(cases, 2))
    return slow_but(quick, dict.fromkeys([*quick, *covering(cases, 3)]))


def covering(cases: Iterable[tuple[Hashable, ...]], together: int) -> Iterator[tuple[Hashable, ...]]:
    """So few cases that so many values that stand together in one case do so in one of these."""
    cases = list(cases)
    met = {case: set(itertools.combinations(enumerate(case), together)) for case in cases}
    missing = set().union(*met.values())
    while missing:
        case = max(cases, key=lambda case: len(met[case] & missing))
        missing -= met[case]
        yield case
