"""How much error a choice of bits makes, and the choice that makes least for its bytes.

An error in the pictures is taken as a sum over parts of a run: a group of layers, a tensor and a phase each. The share
of a part is a product of three, each measured by coding that group, that tensor or that phase alone while all else is
exact: a dozen runs instead of hundreds. How the error falls with bits is measured by coding everything in as many bits.
"""

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xfuser_cocodiff.engine.compression.bit_allocation import NOT_SENT, Bits
from xfuser_cocodiff.engine.kernels.quantize import GRIDS

EXACT_BITS = 16
"""Of a value that is sent as it is, in the type in which models run; bytes are counted as shares of that."""
_CATCHING_UP = 4
"""Times that not to send a part errs, of its share of what came where nothing was sent: the steps that follow have more
to make up for, and the less the fewer parts they are of."""
_DECIBELS_PER_BIT = 6.02
"""Beyond the bits that were measured."""


class Part(NamedTuple):
    """Of a run."""

    group: int
    letter: str
    phase: int


@dataclass(frozen=True)
class Rates:
    """What was measured of a model; errors are mean squares of pictures with values from 0 to 1."""

    probed: float
    """Bits of the runs in which but a part was coded."""
    errors: Mapping[float, float]
    """By the bits in which all was coded, `probed` among them, and NOTHING."""
    groups: Sequence[float]
    """Errors of runs in which only these layers were coded."""
    letters: Mapping[str, float]
    """The same of tensors, and of phases."""
    phases: Sequence[float]
    values: Mapping[Part, float]
    """Of all that crosses slow axes after the first step, the share of each part; they add up to 1."""
    overhead: float
    """Bits of a value for what is sent beside it, such as scales."""

    def error_at(self, bits: Bits) -> float:
        """When all is coded in so many bits: between those that were measured a straight line in decibels."""
        if bits is None:
            return 0.0
        if bits == NOT_SENT:
            return _CATCHING_UP * self.errors[NOT_SENT]
        known = sorted(self.errors.keys() - {NOT_SENT})
        if bits > known[-1]:
            return self.errors[known[-1]] * 10 ** (-(bits - known[-1]) * _DECIBELS_PER_BIT / 10)
        low, high = next(pair for pair in itertools.pairwise(known) if bits <= pair[1])
        slope = math.log(self.errors[high] / self.errors[low]) / (high - low)
        return self.errors[low] * math.exp(slope * (bits - low))

    def share(self, part: Part) -> float:
        """Of the error, when all is coded in as many bits."""
        return (
            self.groups[part.group]
            / sum(self.groups)
            * self.letters[part.letter]
            / sum(self.letters.values())
            * self.phases[part.phase]
            / sum(self.phases)
        )

    def error(self, allotted: Mapping[Part, Bits]) -> float:
        """That a choice is going to make."""
        return sum(self.share(part) * self.error_at(bits) for part, bits in allotted.items())

    def fraction(self, allotted: Mapping[Part, Bits]) -> float:
        """Of the exact bytes after the first step."""
        return sum(self.values[part] * self.size(bits) for part, bits in allotted.items()) / EXACT_BITS

    def size(self, bits: Bits) -> float:
        """Bits that a value takes."""
        if bits is None or bits == NOT_SENT:
            return EXACT_BITS if bits is None else 0.0
        return bits_of(bits) + self.overhead

    def allot(self, within: float | None = None, at_most: float | None = None) -> dict[Part, Bits]:
        """The choice with the least error within some bytes, or with the fewest bytes for an error.

        Starts with nothing that is sent, and spends more where a byte saves most, until the target is met.

        Args:
            within: the share of the exact bytes after the first step.
            at_most: the error.
        """
        allotted: dict[Part, Bits] = dict.fromkeys(self.values, NOT_SENT)
        room = math.inf if within is None else within - self.fraction(allotted)
        error = self.error(allotted)
        best = [step for part in allotted if (step := self._best_step(part, allotted[part], room))]
        heapq.heapify(best)
        while best and (at_most is None or error > at_most):
            step = heapq.heappop(best)
            if step.more <= room:
                allotted[step.part] = step.bits
                room, error = room - step.more, error - step.saved
            if following := self._best_step(step.part, allotted[step.part], room):
                heapq.heappush(best, following)
        return allotted

    def _best_step(self, part: Part, bits: Bits, room: float) -> "_Step | None":
        """To more bits for a part, of all that fit: so that no good step hides behind a bad one."""
        share, values, now = self.share(part), self.values[part] / EXACT_BITS, self.error_at(bits)
        steps = []
        for other in (*GRIDS, None):
            more = values * (self.size(other) - self.size(bits))
            if 0 < more <= room:
                saved = share * (now - self.error_at(other))
                steps.append(_Step(-saved / more, part, other, saved, more))
        return min(steps, key=lambda step: step.order, default=None)


class _Step(NamedTuple):
    order: float
    """What saves most error for its bytes comes first."""
    part: Part
    bits: Bits
    saved: float
    """Error."""
    more: float
    """Bytes, as a share of all."""


def bits_of(bits: float) -> float:
    """Of a value, as bytes hold them: 2.7 is said of a third of one."""
    return 8 / GRIDS[bits].per_byte
