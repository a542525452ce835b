"""Link references: what both ends of a link hold of the values that crossed it last.

Sizes in shapes: L links; G groups of tokens, H heads, T tokens, D head dim.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xfuser_cocodiff.engine.codec.rows import GAIN_STEPS, Int8Rows, Prediction

_INITIAL_GAIN = GAIN_STEPS // 2
"""Gain of the prediction before there is an estimate, in units of 1 / GAIN_STEPS."""


class LinkReference:
    """Predictor state of one tensor at one end of its links; the other ends hold the same, bit for bit.

    Args:
        is_exact: whether values are stored as they are, not in int8: receivers of V-Major use them again.
    """

    def __init__(self, is_exact: bool = False) -> None:
        self._is_exact = is_exact
        self._values: torch.Tensor | None = None
        self._current: Int8Rows | None = None
        self._previous: Int8Rows | None = None
        self.shape: torch.Size = torch.Size()
        """Shape of the reference, (L, G, H, T, D)."""
        self._dtype: torch.dtype | None = None
        self.gains: torch.Tensor | None = None
        """Gains that the sender estimated last, uint8 (L), in units of 1 / GAIN_STEPS."""
        self.last_values: torch.Tensor | None = None
        """Values of the step before, if the sender selects tokens by their change."""
        self.weight = 0.0
        """Weight at which the leading branch's reference was subtracted from this one; 0 for a reference of the values
        themselves."""

    @property
    def has_values(self) -> bool:
        """Whether there is a reference."""
        return self._current is not None or self._values is not None

    def fits(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Return whether there is a reference for values of this shape and type."""
        return self.has_values and self.shape == tuple(shape) and self._dtype == dtype

    @property
    def values(self) -> torch.Tensor:
        """Values of the reference, which must be there, (L, G, H, T, D)."""
        if self._values is not None:
            return self._values
        assert self._current and self._dtype
        return self._current.values.view(self.shape).to(self._dtype)

    def prediction(self, predicts: bool) -> Prediction:
        """Return the inputs of the prediction; of the reference itself unless it is extrapolated."""
        assert self._current
        gains = self.gains
        if gains is None:
            gains = _same_gain(_INITIAL_GAIN, self.shape[0], self._current.levels.device)
        return Prediction(self._current, self._previous if predicts else None, gains)

    def advance(self, values: torch.Tensor, weight: float = 0.0) -> None:
        """Replace the reference by values, (L, G, H, T, D), zeros in place of those that are not finite.

        Args:
            values: new reference.
            weight: the new :attr:`weight`.
        """
        if self._is_exact:
            self._set(None, values.shape, values.dtype, False, weight)
            self._values = torch.nan_to_num(values, 0.0, 0.0, 0.0).contiguous()
        else:
            self._set(Int8Rows.of(values), values.shape, values.dtype, False, weight)

    def advance_rows(
        self, rows: Int8Rows, shape: Sequence[int], dtype: torch.dtype, keeps_previous: bool, weight: float = 0.0
    ) -> None:
        """Replace the reference by rows that a kernel has made.

        Args:
            rows: new reference.
            shape: (L, G, H, T, D).
            dtype: type of the values.
            keeps_previous: whether to keep the one before, for extrapolation; it is dropped if its shape or weight
                differs.
            weight: the new :attr:`weight`.
        """
        self._set(rows, shape, dtype, keeps_previous, weight)

    def _set(
        self, rows: Int8Rows | None, shape: Sequence[int], dtype: torch.dtype, keeps_previous: bool, weight: float
    ) -> None:
        if weight != self.weight:
            self.weight, self.gains, keeps_previous = weight, None, False
        self._previous = self._current if keeps_previous and self.fits(shape, dtype) else None
        self._current, self.shape, self._dtype = rows, torch.Size(shape), dtype

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        """What both ends hold."""
        exact = () if self._values is None else (self._values,)
        return (*exact, *(self._current or ()), *(self._previous or ()))

    def checksums(self) -> list[int]:
        """Return a 64-bit sum of the stored bytes of each link, which both ends must have in common. The host waits."""
        stored = [tensor.contiguous().flatten(1).view(torch.uint8) for tensor in self.stored]
        return sum(tensor.sum(1, dtype=torch.int64) for tensor in stored).tolist() if stored else []

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        of_selection = () if self.last_values is None else (self.last_values,)
        return sum(tensor.nbytes for tensor in (*self.stored, *of_selection))


@dataclass
class SentValues:
    """Values of a leading branch that this rank has sent in a step."""

    step: int
    """The step."""
    shape: tuple[int, ...]
    """Their shape (L, G, H, T, D)."""
    dtype: torch.dtype
    """Their type."""
    kept: torch.Tensor | None = None
    """The values, (L, G, H, T, D); None if they are not kept."""
    error_energy: torch.Tensor | None = None
    """Sum of squared reconstruction errors, float32; None if they were sent losslessly."""


@functools.cache  # created once, since copying it to a device blocks the host
def _same_gain(gain: int, links: int, device: torch.device) -> torch.Tensor:
    """Return a gain for all links, uint8 (L)."""
    return torch.full((links,), gain, dtype=torch.uint8, device=device)
