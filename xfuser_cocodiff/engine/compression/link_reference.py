"""Link references: what both ends of a link hold of the values that crossed it last.

Sizes in shapes: L links; G groups of tokens, H heads, T tokens, D head dim.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xfuser_cocodiff.engine.kernels.quantize import from_int8, to_int8
from xfuser_cocodiff.engine.kernels.rows import GAIN_STEPS, Prediction
from xfuser_cocodiff.engine.kernels.torch_kernels import predict

ADAPTIVE = "auto"
"""Predictor whose gain the sender estimates from the last change of the values."""
_INITIAL_GAIN = GAIN_STEPS // 2
"""Gain of the adaptive predictor before there is an estimate, in units of 1 / GAIN_STEPS."""


class LinkReference:
    """Predictor state of one tensor at one end of its links; the other ends hold the same, bit for bit.

    Args:
        is_int8: whether references are stored in int8, which both ends then use as their values.
    """

    def __init__(self, is_int8: bool = False) -> None:
        self.is_int8 = is_int8
        self._current: tuple[torch.Tensor, ...] = ()
        self._previous: tuple[torch.Tensor, ...] = ()
        self.channel_scales: torch.Tensor | None = None
        """Scales of the channels, float32 (L, H, D); None for ones."""
        self.needs_channel_scales = False
        """Whether a lossless message has left values whose scales are computed when residuals to them are coded."""
        self.gains: torch.Tensor | None = None
        """Gains that the sender estimated last, uint8 (L), in units of 1 / GAIN_STEPS."""
        self.last_values: torch.Tensor | None = None
        """Values of the step before, if the sender scores tokens by CHANGE."""
        self.weight = 0.0
        """Weight at which the leading branch's reference was subtracted from this one; 0 for a reference of the values
        themselves."""

    def fits(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Return whether there is a reference for values of this shape and type."""
        return bool(self._current) and self._current[0].shape == tuple(shape) and self._dtype == dtype

    def predict(self, predictor: float | str = 0.0) -> torch.Tensor:
        """Return the values that both ends predict, (L, G, H, T, D)."""
        return predict(self.prediction(predictor))

    def prediction(self, predictor: float | str) -> Prediction:
        """Return the inputs of the prediction for a codec's predictor."""
        current = self._read(self._current)
        previous = self._read(self._previous) if predictor and self._previous else None
        return Prediction(current, previous, self._gains(predictor), self.channel_scales)

    def _gains(self, predictor: float | str) -> torch.Tensor:
        """Return the gain of each link, uint8 (L)."""
        if predictor == ADAPTIVE and self.gains is not None:
            return self.gains
        current = self._current[0]
        gain = _INITIAL_GAIN if predictor == ADAPTIVE else round(GAIN_STEPS * float(predictor))
        return _same_gain(gain, len(current), current.device)

    def advance(self, values: torch.Tensor, keeps_previous: bool, weight: float = 0.0) -> None:
        """Replace the reference.

        Args:
            values: new reference, (L, G, H, T, D).
            keeps_previous: whether to keep the one before, for extrapolation; it is dropped if its shape or weight
                differs.
            weight: the new :attr:`weight`.
        """
        if weight != self.weight:
            self.weight, self.gains, keeps_previous = weight, None, False
        self._previous = self._current if keeps_previous and self.fits(values.shape, values.dtype) else ()
        self._dtype = values.dtype
        self._current = to_int8(values) if self.is_int8 else (values,)

    @property
    def has_values(self) -> bool:
        """Whether there is a reference."""
        return bool(self._current)

    @property
    def shape(self) -> torch.Size:
        """Shape of the reference, which must be there."""
        return self._current[0].shape

    def advance_unsent(self, predictor: float | str) -> None:
        """Advance to the prediction, for a codec that sends nothing."""
        if predictor in (0.0, ADAPTIVE):  # an adaptive gain is not known to the receiver
            self._previous = self._current if predictor else ()
        else:
            self.advance(self.predict(predictor), keeps_previous=True, weight=self.weight)

    def to_int8(self) -> None:
        """Store references in int8 from now on."""
        if not self.is_int8:
            self._current, self._previous = (
                to_int8(*stored) if stored else () for stored in (self._current, self._previous)
            )
            self.is_int8 = True

    def _read(self, stored: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return from_int8(*stored).to(self._dtype) if self.is_int8 else stored[0]

    def checksums(self) -> list[int]:
        """Return a 64-bit sum of the stored bytes of each link, which both ends must have in common. The host waits."""
        stored = [tensor.contiguous().flatten(1).view(torch.uint8) for tensor in (*self._current, *self._previous)]
        return sum(tensor.sum(1, dtype=torch.int64) for tensor in stored).tolist() if stored else []

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        stored = (*self._current, *self._previous, *([] if self.last_values is None else [self.last_values]))
        return sum(tensor.nbytes for tensor in stored)


@dataclass
class SentValues:
    """Values of a leading branch that this rank has sent in a step."""

    step: int
    """The step."""
    shape: tuple[int, ...]
    """Their shape (L, G, H, T, D)."""
    dtype: torch.dtype
    """Their type."""
    kept: tuple[torch.Tensor, ...] = ()
    """The values, or their int8 levels and codes; empty if they are not kept."""
    error_energy: torch.Tensor | None = None
    """Sum of squared reconstruction errors, float32; None if they were sent losslessly."""

    def read(self) -> torch.Tensor:
        """Return the values, (L, G, H, T, D)."""
        return from_int8(*self.kept).to(self.dtype) if len(self.kept) > 1 else self.kept[0]


@functools.cache  # created once, since copying it to a device blocks the host
def _same_gain(gain: int, links: int, device: torch.device) -> torch.Tensor:
    """Return a gain for all links, uint8 (L)."""
    return torch.full((links,), gain, dtype=torch.uint8, device=device)
