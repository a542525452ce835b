"""Instants of an emulated step, as expressions of the ends of its collectives.

Kernels have known durations, but how long a collective takes is only known once it has run. So an instant is the latest
of some collectives' ends, each plus an offset, and of a time since the begin of the step. Times are seconds of the real
machine.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Instant(NamedTuple):
    """The latest of `floor` and of the ends of collectives plus their offsets."""

    floor: float = 0.0
    """Earliest possible time, in seconds since the step began."""
    offsets: Mapping[Any, float] = {}
    """Seconds from the end of each collective to this instant, at least."""

    def after(self, seconds: float) -> "Instant":
        """Return the instant some seconds later."""
        return Instant(self.floor + seconds, {end: offset + seconds for end, offset in self.offsets.items()})

    def latest(self, other: "Instant") -> "Instant":
        """Return the later of two instants."""
        if not other.offsets:
            return self if other.floor <= self.floor else Instant(other.floor, self.offsets)
        merged = dict(self.offsets)
        for end, offset in other.offsets.items():
            merged[end] = max(offset, merged.get(end, offset))
        return Instant(max(self.floor, other.floor), merged)

    def after_collective(self, collective: Any) -> "Instant":
        """Return the later of this instant and a collective's end."""
        return self.latest(Instant(0.0, {collective: 0.0}))

    def resolve(self, ends: Mapping[Any, float]) -> float:
        """Return the time, given the ends of all collectives that it depends on."""
        return max([self.floor, *(ends[end] + offset for end, offset in self.offsets.items())])
