"""Selection of quick test cases: the other ones are marked slow and run with `--all`."""

import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Any

import pytest


def slow(*case: Any) -> Any:
    """Return a case that is marked slow, mostly because a quick one tests the same behavior."""
    return pytest.param(*case, marks=pytest.mark.slow)


def slow_but(quick: Collection, cases: Iterable) -> list:
    """Return all cases, of which only `quick` are not marked slow."""
    cases = list(cases)
    assert all(case in cases for case in quick)
    return [case if case in quick else slow(*case) if isinstance(case, tuple) else slow(case) for case in cases]


def in_turn(cases: Iterable[tuple], values: Iterable) -> list:
    """Return all cases with each value appended; each case is quick with one value, and the values take turns."""
    cases, values = list(cases), list(values)
    quick = [(*case, value) for case, value in zip(cases, itertools.cycle(values), strict=False)]
    return slow_but(quick, [(*case, value) for case in cases for value in values])


def covering(cases: Iterable[tuple[Hashable, ...]], together: int) -> Iterator[tuple[Hashable, ...]]:
    """Yield few of the cases that together contain every combination of `together` values of a case."""
    cases = list(cases)
    combinations = {case: set(itertools.combinations(enumerate(case), together)) for case in cases}
    missing = set().union(*combinations.values())
    while missing:
        case = max(cases, key=lambda case: len(combinations[case] & missing))
        missing -= combinations[case]
        yield case
