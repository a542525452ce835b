"""Link references: what both ends of a link hold of the values that crossed it last.

Sizes in shapes: L links; G groups of tokens, H heads, T tokens, D head dim.
"""

from collections.abc import Sequence

import torch

from xfuser_cocodiff.engine.codec.memory import lasting
from xfuser_cocodiff.engine.codec.rows import GAIN_STEPS, Int8Rows, Prediction, rows_of

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
        self.shape: Sequence[int] = ()
        """Shape of the reference, (L, G, H, T, D)."""
        self._dtype: torch.dtype | None = None
        self.gains: torch.Tensor | None = None
        """Gains of the next prediction, uint8 (L), in units of 1 / GAIN_STEPS; the sender's are estimates."""
        self.last_values: torch.Tensor | None = None
        """Values of the step before, if the sender selects tokens by their change."""
        self.is_difference = False
        """Whether this is a reference of the difference to the leading branch, and not of the values themselves."""

    @property
    def has_values(self) -> bool:
        """Whether there is a reference."""
        return self._current is not None or self._values is not None

    def fits(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Return whether there is a reference for values of this shape and type."""
        return self._dtype == dtype and self.shape == shape

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
        if not predicts:
            return Prediction(self._current)
        if self.gains is None:
            self.gains = lasting(self.shape[:1], torch.uint8, self._current.levels.device).fill_(_INITIAL_GAIN)
        return Prediction(self._current, self._previous, self.gains)

    def memory(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, keeps_previous: bool) -> Int8Rows:
        """Return where the next reference is to be written: to the memory of the oldest one that is no longer needed.

        Args:
            shape: (L, G, H, T, D) of the values.
            dtype: their type.
            device: where they are.
            keeps_previous: whether the present reference is kept, for extrapolation.
        """
        oldest = self._previous if keeps_previous else self._current
        if oldest is not None and self.fits(shape, dtype):
            return oldest
        return Int8Rows.empty(shape[0], *rows_of(shape), device)

    def advance(self, values: torch.Tensor, is_difference: bool = False) -> None:
        """Replace the reference by values, (L, G, H, T, D), zeros in place of those that are not finite.

        Args:
            values: new reference.
            is_difference: see :attr:`is_difference`.
        """
        rows = None if self._is_exact else Int8Rows.of(values)
        self.advance_rows(rows, values.shape, values.dtype, is_difference=is_difference)
        if self._is_exact:
            self._values = torch.nan_to_num(values, 0.0, 0.0, 0.0).contiguous()

    def advance_rows(
        self,
        rows: Int8Rows | None,
        shape: Sequence[int],
        dtype: torch.dtype,
        keeps_previous: bool = False,
        is_difference: bool = False,
    ) -> None:
        """Replace the reference by rows that a kernel has written to :meth:`memory`.

        Args:
            rows: new reference; None for one that is stored as it is.
            shape: (L, G, H, T, D).
            dtype: type of the values.
            keeps_previous: whether to keep the one before, for extrapolation; it is dropped if its shape differs, or if
                one of both is of a difference.
            is_difference: see :attr:`is_difference`.
        """
        if is_difference is not self.is_difference:
            self.is_difference, self.gains, keeps_previous = is_difference, None, False
        self._previous = self._current if keeps_previous and self.fits(shape, dtype) else None
        self._current, self.shape, self._dtype = rows, shape, dtype

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
