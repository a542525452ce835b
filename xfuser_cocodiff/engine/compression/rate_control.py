"""Rate control: the bits per value of each step, so that the mean error of a run stays at a target.

The error of a residual is the distortion of its grid times the norm of the residual, which changes little from one step
to the next. So the error of the last known step over the distortion of its bits, times the distortion of others, is
what these would leave. All layers of a step have the same bits: equal errors in all layers and steps would cost more
bits for the same image, since large changes at the ends of a run matter less than they cost.

Where the error of a step is below or above the target, later steps make up for it, within limits.
"""

from dataclasses import dataclass, field

from xfuser_cocodiff.engine.codec.quantize import GRIDS

LEVELS = tuple(bits for bits in GRIDS if bits > 1)
"""Bits per value that a step may have, fewest first; with 1 bit a scale costs as much as it saves."""
FIRST_CHANGE = 0.5
"""Norm of the change from step to step over that of the values, assumed until one is measured: more than the published
first change of FLUX.1-dev."""
_MOST_CREDIT, _MOST_DEBT = 0.25, 0.25
"""Largest part of the target by which a step may exceed it, or must stay below it, for what earlier steps had."""


@dataclass
class RateControl:
    """Choice of the bits of each step. Ranks that share links pass the same errors, and so have the same bits."""

    target: float
    """Mean error to stay at: norm of decoded minus sent values over the norm of sent ones, over tensors and steps."""
    _change: float | None = None
    """Norm of the residuals over that of the values, at the last known step; None before one is known."""
    _credit: float = 0.0
    """Sum over the known steps of what they left unused of the target."""
    _unread: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Bits and expected error of each step whose error is not known yet."""

    def bits(self, step: int) -> float:
        """Return the bits per value of a step: the fewest whose expected error the target allows."""
        if step not in self._unread:
            expected = sum(self.target - error for _, error in self._unread.values())
            credit = min(max(self._credit + expected, -_MOST_DEBT * self.target), _MOST_CREDIT * self.target)
            allowed = self.target if self._change is None else self.target + credit
            bits = next((bits for bits in LEVELS if self._expected(bits) <= allowed), LEVELS[-1])
            self._unread[step] = bits, self._expected(bits)
        return self._unread[step][0]

    def note(self, step: int, errors: float, count: float) -> None:
        """Note the errors of a step, summed over ranks.

        Args:
            step: a step; it was a keyframe if :meth:`bits` has not returned its bits.
            errors: sum over tensors, layers and branches.
            count: number of the errors; 0 if nothing lossy was sent.
        """
        bits, _ = self._unread.pop(step, (None, 0.0))
        if count:
            error = errors / count
            self._credit += self.target - error
            self._change = self._change if bits is None else error / GRIDS[bits].distortion

    def _expected(self, bits: float) -> float:
        return (FIRST_CHANGE if self._change is None else self._change) * GRIDS[bits].distortion
