"""A rate-distortion model of compressed communication, and the bit allocation with the least error for its bytes.

The error of the images is modeled as a sum over allocation units: a layer group, a tensor and a phase of the run each.
The fraction of the error that a unit causes is a product of three factors. Each factor is measured by compressing only
that group, only that tensor or only that phase, and all else exactly: a dozen runs instead of hundreds. The error as a
function of bits is measured by compressing everything with the same bits.
"""

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from xfuser_cocodiff.engine.compression.bit_allocation import NOT_SENT, Bits
from xfuser_cocodiff.engine.kernels.quantize import GRIDS

EXACT_BITS = 16
"""Bits of a value that is sent exactly, in the dtype of models; fractions of bytes relate to it."""
_NOT_SENT_FACTOR = 4
"""Factor for the error of a unit that is not sent, relative to its fraction of the error of a run in which nothing is
sent. Later steps have to correct more, since the other units change meanwhile."""
_DECIBELS_PER_BIT = 6.02
"""Slope of the error beyond the bits that were measured."""


class AllocationUnit(NamedTuple):
    """Part of a run whose values all have the same bits."""

    group: int
    """Index of the layer group."""
    tensor: str
    """One of "q", "k", "v" and "o"."""
    phase: int
    """Index of the phase."""


Allocation = Mapping[AllocationUnit, Bits]
"""Bits by allocation unit."""


@dataclass(frozen=True)
class RateDistortion:
    """Measurements of a model; errors are mean squared errors of images with values in [0, 1]."""

    probe_bits: float
    """Bits in the runs that compress a single group, tensor or phase."""
    errors: Mapping[float, float]
    """Errors with the same bits everywhere, by bits; they include `probe_bits` and NOT_SENT."""
    group_errors: Sequence[float]
    """Errors of the runs that compress a single layer group."""
    tensor_errors: Mapping[str, float]
    """Errors of the runs that compress a single tensor."""
    phase_errors: Sequence[float]
    """Errors of the runs that compress a single phase."""
    value_fractions: Mapping[AllocationUnit, float]
    """Fraction of the values on slow axes after the first step, by unit; they add up to 1."""
    overhead_bits: float
    """Bits per value for metadata such as scales."""

    def to_json(self) -> dict[str, Any]:
        """Return the measurements for the schedule file."""
        return {
            "probed": self.probe_bits,
            "errors": dict(self.errors),
            "groups": list(self.group_errors),
            "letters": dict(self.tensor_errors),
            "phases": list(self.phase_errors),
            "values": [[*unit, fraction] for unit, fraction in self.value_fractions.items()],
            "overhead": self.overhead_bits,
        }

    def uniform_error(self, bits: Bits) -> float:
        """Return the error with the same bits everywhere, interpolated linearly in decibels between measured bits."""
        if bits is None:
            return 0.0
        if bits == NOT_SENT:
            return _NOT_SENT_FACTOR * self.errors[NOT_SENT]
        measured = sorted(self.errors.keys() - {NOT_SENT})
        if bits > measured[-1]:
            return self.errors[measured[-1]] * 10 ** (-(bits - measured[-1]) * _DECIBELS_PER_BIT / 10)
        low, high = next(pair for pair in itertools.pairwise(measured) if bits <= pair[1])
        slope = math.log(self.errors[high] / self.errors[low]) / (high - low)
        return self.errors[low] * math.exp(slope * (bits - low))

    def error_fraction(self, unit: AllocationUnit) -> float:
        """Return the fraction of the error that a unit causes if all units have the same bits."""
        return (
            self.group_errors[unit.group]
            / sum(self.group_errors)
            * self.tensor_errors[unit.tensor]
            / sum(self.tensor_errors.values())
            * self.phase_errors[unit.phase]
            / sum(self.phase_errors)
        )

    def predict_error(self, allocation: Allocation) -> float:
        """Return the expected error of an allocation."""
        return sum(self.error_fraction(unit) * self.uniform_error(bits) for unit, bits in allocation.items())

    def bytes_fraction(self, allocation: Allocation) -> float:
        """Return the bytes of an allocation as a fraction of the lossless bytes, after the first step."""
        bits_per_value = sum(self.value_fractions[unit] * self.sent_bits(bits) for unit, bits in allocation.items())
        return bits_per_value / EXACT_BITS

    def sent_tensors(self, least_fraction: float) -> set[str]:
        """Return the letters of the tensors that have more than a fraction of the values on slow axes."""
        fractions = dict.fromkeys(self.tensor_errors, 0.0)
        for unit, fraction in self.value_fractions.items():
            fractions[unit.tensor] += fraction
        return {letter for letter, fraction in fractions.items() if fraction > least_fraction}

    def sent_bits(self, bits: Bits) -> float:
        """Return the bits per value that are sent, metadata included."""
        if bits is None or bits == NOT_SENT:
            return EXACT_BITS if bits is None else 0.0
        return stored_bits(bits) + self.overhead_bits

    def allocate(self, max_bytes: float | None = None, max_error: float | None = None) -> dict[AllocationUnit, Bits]:
        """Return the allocation with the least error for some bytes, or with the fewest bytes for an error.

        The greedy algorithm starts with units that are not sent. It repeats the upgrade that reduces the error most per
        byte, until the target is met.

        Args:
            max_bytes: as a fraction of the lossless bytes after the first step.
            max_error: mean squared error.
        """
        allocation: dict[AllocationUnit, Bits] = dict.fromkeys(self.value_fractions, NOT_SENT)
        budget = math.inf if max_bytes is None else max_bytes - self.bytes_fraction(allocation)
        error = self.predict_error(allocation)
        upgrades = [upgrade for unit, bits in allocation.items() if (upgrade := self._best_upgrade(unit, bits, budget))]
        heapq.heapify(upgrades)
        while upgrades and (max_error is None or error > max_error):
            upgrade = heapq.heappop(upgrades)
            unit = upgrade.unit
            if upgrade.extra_bytes <= budget:
                allocation[unit] = upgrade.bits
                budget, error = budget - upgrade.extra_bytes, error - upgrade.error_reduction
            if following := self._best_upgrade(unit, allocation[unit], budget):
                heapq.heappush(upgrades, following)
        return allocation

    def _best_upgrade(self, unit: AllocationUnit, bits: Bits, budget: float) -> "_Upgrade | None":
        """Return the best upgrade of a unit among all larger bits within the budget.

        All larger bits are considered, not only the next ones, so that a bad small upgrade does not hide a good one.
        """
        fraction, values = self.error_fraction(unit), self.value_fractions[unit] / EXACT_BITS
        error = self.uniform_error(bits)
        upgrades = []
        for other in (*GRIDS, None):
            extra_bytes = values * (self.sent_bits(other) - self.sent_bits(bits))
            if 0 < extra_bytes <= budget:
                reduction = fraction * (error - self.uniform_error(other))
                upgrades.append(_Upgrade(-reduction / extra_bytes, unit, other, reduction, extra_bytes))
        return min(upgrades, key=lambda upgrade: upgrade.priority, default=None)


class _Upgrade(NamedTuple):
    priority: float
    """Negative error reduction per byte; the smallest comes first in the heap."""
    unit: AllocationUnit
    bits: Bits
    error_reduction: float
    extra_bytes: float
    """As a fraction of the lossless bytes."""


def stored_bits(bits: float) -> float:
    """Return the bits per value as packed in bytes: 2.7 bits stand for three values in a byte."""
    return 8 / GRIDS[bits].per_byte
