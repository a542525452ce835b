"""Formats figures for reports, tables and progress lines."""

from collections.abc import Sequence
from statistics import median

NOT_MEASURED = "-"
"""Cell of a table whose figure was not measured or does not apply."""
INSTALL_REPORT_EXTRA = "pip install 'xfuser-cocodiff[report]'"
"""Command that installs the libraries of `cocodiff compare`'s report."""


def format_seconds(seconds: float | None) -> str:
    """Format a duration in seconds or milliseconds."""
    if seconds is None:
        return NOT_MEASURED
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def format_median_range(seconds: Sequence[float]) -> str:
    """Format the median of some durations, followed by their min-max range if there are several."""
    middle = median(seconds)
    unit, factor = ("s", 1) if middle >= 1 else ("ms", 1000)
    digits = 0 if factor * middle >= 100 else 1 if factor * middle >= 10 else 2
    low, high = (f"{factor * pick(seconds):.{digits}f}" for pick in (min, max))
    return f"{factor * middle:.{digits}f} {unit}" + (f" ({low} to {high})" if len(seconds) > 1 else "")


def format_bytes(count: float | None) -> str:
    """Format a number of bytes in B, kB, MB or GB (powers of 1000)."""
    if count is None:
        return NOT_MEASURED
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if count >= 10**power:
            return f"{count / 10**power:.2f} {unit}"
    return f"{count:.0f} B"


def sum_over_axes(by_axis: dict[str, int] | None) -> int | None:
    """Return the sum of a figure over all axes, or None if it was not measured."""
    return None if by_axis is None else sum(by_axis.values())


def format_percent(fraction: float) -> str:
    """Format a fraction as a percentage."""
    return f"{fraction * 100:.1f} %"


def format_db(value: float | None) -> str:
    """Format a PSNR in decibels; a dash where it is infinite or was not measured."""
    return NOT_MEASURED if value is None else f"{value:.1f} dB"
