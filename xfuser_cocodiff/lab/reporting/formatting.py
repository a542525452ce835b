"""Words for figures, as reports and tables have them."""

from collections.abc import Sequence
from statistics import median

NOTHING = "-"
"""Stands for a figure that cannot be had."""


def time(seconds: float | None) -> str:
    """A duration in a unit that suits it."""
    if seconds is None:
        return NOTHING
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def spread(seconds: Sequence[float]) -> str:
    """The median of some durations, and behind it their range."""
    middle = median(seconds)
    unit, factor = ("s", 1) if middle >= 1 else ("ms", 1000)
    digits = 0 if factor * middle >= 100 else 1 if factor * middle >= 10 else 2
    least, most = (f"{factor * pick(seconds):.{digits}f}" for pick in (min, max))
    return f"{factor * middle:.{digits}f} {unit}" + (f" ({least} to {most})" if len(seconds) > 1 else "")


def size(count: float | None) -> str:
    """A number of bytes in a decimal unit that suits it."""
    if count is None:
        return NOTHING
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if count >= 10**power:
            return f"{count / 10**power:.2f} {unit}"
    return f"{count:.0f} B"


def total(by_axis: dict[str, int] | None) -> int | None:
    """The sum over axes of a figure that may not be had."""
    return None if by_axis is None else sum(by_axis.values())


def percent(share: float) -> str:
    """A share as a percentage."""
    return f"{share * 100:.1f} %"


def decibels(value: float | None) -> str:
    """A PSNR; a dash where it is infinite or cannot be had."""
    return NOTHING if value is None else f"{value:.1f} dB"


INSTALL = "pip install 'xfuser-cocodiff[report]'"
