"""The rule for slow axes: those along which encoding takes less time than it saves."""

import itertools
from collections.abc import Mapping

SLOW_RATIO, FURTHER_SLOW_RATIO = 0.1, 0.2
"""Ratios of link bandwidth to codec throughput below which an axis is slow: one of them, and further axes, whose values
are encoded anyway. Slow axes are the outermost ones: an axis inside one that is not slow is not slow either. Both are
far below 1 because lossless communication is mostly hidden behind attention, and encoding is not. In predictions from
recorded steps, coding saves 1 to 79 % of the step where the ratio is 0.075 or less; where it is 0.11 to 0.18, the step
is 11 % longer to 2 % shorter."""


def slow_axes(rates: Mapping[str, float], codec_bytes_per_second: float) -> tuple[str, ...]:
    """Return the names of the outermost axes that are slow beside a codec.

    Args:
        rates: bytes per second of a rank along each axis with several ranks, outermost first.
        codec_bytes_per_second: throughput of the codec.
    """
    further, pays = FURTHER_SLOW_RATIO * codec_bytes_per_second, SLOW_RATIO * codec_bytes_per_second
    slow = dict(itertools.takewhile(lambda item: item[1] < further, rates.items()))
    return tuple(slow) if any(rate < pays for rate in slow.values()) else ()
