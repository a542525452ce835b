"""Formatting of figures."""

import pytest

from xfuser_cocodiff.tools.reporting.formatting import format_median_range


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([2.0, 1.5, 12.25], "2.00 s (1.50 to 12.25)"),
        ([0.25], "250 ms"),
        ([0.0125, 0.01, 0.9], "12.5 ms (10.0 to 900.0)"),
        ([0.00014, 0.00019, 0.00014], "0.14 ms (0.14 to 0.19)"),
    ],
)
def test_range_has_the_unit_and_digits_of_the_median(seconds: list[float], expected: str) -> None:
    assert format_median_range(seconds) == expected
