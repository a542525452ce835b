"""Arguments of the kernels: predictions, link references, payloads, and views of slots.

The backends `torch_kernels` (any device) and `triton_kernels` (accelerators) share them; the latter reads and writes
each tensor once. A payload of one backend decodes to the same bits with the other: only the encoder computes scales,
from sums whose order differs between backends.

Sizes in shapes: P slots, one per destination; L links, the slots of other ranks; G groups of tokens, H heads, T tokens,
D head dim; R rows of a link, each of N values: a token of a head, or several where D is small. `local_slots` is the
contiguous range of slots that belong to this rank and are skipped; None means that all P slots are links.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.codec.memory import lasting
from xfuser_cocodiff.engine.codec.quantize import from_int8, level_bytes, to_int8, tokens_per_row


class Int8Rows(NamedTuple):
    """A link reference: rows of values in int8, the same bits at both ends."""

    levels: torch.Tensor
    """int8 (L, R, N), contiguous."""
    codes: torch.Tensor
    """Code of each row's maximum, uint8 (L, R), contiguous."""

    @classmethod
    def of(cls, values: torch.Tensor) -> "Int8Rows":
        """Return the rows of values (L, G, H, T, D), with zeros in place of those that are not finite."""
        return cls(*to_int8(in_rows(torch.nan_to_num(values.float(), 0.0, 0.0, 0.0))))

    @classmethod
    def empty(cls, links: int, rows: int, size: int, device: torch.device) -> "Int8Rows":
        """Return memory for rows of `size` values."""
        levels = lasting((links, rows, size), torch.int8, device)
        return cls(levels, lasting((links, rows), torch.uint8, device))

    def write(self, values: torch.Tensor) -> None:
        """Replace the rows by those of float32 values (L, R, N)."""
        for target, new in zip(self, to_int8(values), strict=True):
            target.copy_(new)

    @property
    def values(self) -> torch.Tensor:
        """Values that the rows stand for, float32 (L, R, N)."""
        return from_int8(*self)


class Prediction(NamedTuple):
    """Inputs of the prediction that both ends of a link make: reference + gain * (reference - previous)."""

    reference: Int8Rows | None = None
    """Link reference; None to predict zeros, as for a keyframe."""
    previous: Int8Rows | None = None
    """Link reference of the step before; None to predict the reference itself."""
    gains: torch.Tensor | None = None
    """Gain of each link in units of 1 / GAIN_STEPS, uint8 (L); a previous reference needs one. The payload carries it,
    and the receiver uses what has arrived in place of its own. The encoder replaces it by an estimate for the next step
    if there is a previous reference."""


class MessagePart(NamedTuple):
    """A tensor of a message, and how it is encoded."""

    values: torch.Tensor
    """(P, G, H, T, D), of any strides: the values to encode, or the target that decoded values are written to."""
    prediction: Prediction
    """Prediction of the values, the same at both ends."""
    bits: float
    """Bits per value of the residual, one of quantize.GRIDS."""
    payload: torch.Tensor
    """uint8 (P, n), see :class:`PayloadLayout`; the local slots are not accessed. Slots may have gaps between them and
    begin at an even address."""
    new_reference: Int8Rows
    """Where the new link reference is written: the values as the receiver decodes them; with a base, differences to it.
    It may be the memory of the prediction's references."""
    local_slots: range | None = None
    """Slots of this rank, which are skipped; None for none."""
    base: torch.Tensor | None = None
    """Values (L, G, H, T, D), of any strides, whose difference is encoded, such as those of another branch; the
    prediction is one of the difference. The receiver adds its own, such as the decoded values of the sender's base.
    None to encode the values themselves. The payload has the same form."""

    @property
    def sends_gain(self) -> bool:
        """Whether the payload ends with GAIN_BYTES bytes that carry the gain."""
        return self.prediction.gains is not None


GAIN_STEPS = 32
"""Number of steps between a gain of 0 and a gain of 1."""
GAIN_BYTES = 8
"""Bytes at the end of a payload that carry the sender's gain in the first of them; 8 keep values aligned."""
_SAMPLED_TOKENS = 64


def sample_stride(tokens: int) -> int:
    """Return the stride over tokens at which the gain is estimated, so that about 64 of them are read."""
    return max(1, tokens // _SAMPLED_TOKENS)


class PayloadLayout(NamedTuple):
    """Where a slot's payload of quantized values has what, in bytes: levels from 0, then scales, then a gain."""

    scales: int
    """Offset of the scales, one byte for each row."""
    gain: int
    """Offset of the gain, or the end of a payload without one."""
    size: int
    """Bytes of the payload."""

    @classmethod
    def of(cls, bits: float, rows: int, size: int, sends_gain: bool) -> "PayloadLayout":
        """Return the layout for rows of `size` values."""
        scales = level_bytes(bits, rows, size)
        return cls(scales, scales + rows, scales + rows + GAIN_BYTES * sends_gain)


def rows_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return R and N, the number of rows of a link and of values in each, for values (L, G, H, T, D)."""
    _, groups, heads, tokens, dim = shape
    row_tokens = tokens_per_row(dim, tokens)
    return groups * heads * (tokens // row_tokens), row_tokens * dim


def in_rows(values: torch.Tensor) -> torch.Tensor:
    """Return values (L, G, H, T, D) as rows (L, R, N)."""
    return values.reshape(len(values), *rows_of(values.shape))


def num_links(slots: int, local_slots: range | None) -> int:
    """Return L, the number of slots that belong to other ranks."""
    return slots - len(local_slots or ())


def link_shape(values: torch.Tensor, local_slots: range | None) -> tuple[int, ...]:
    """Return the shape (L, ...) of what values (P, ...) have for other ranks."""
    slots, *rest = values.shape
    return num_links(slots, local_slots), *rest


def remote_slots(values: torch.Tensor, local_slots: range | None) -> torch.Tensor:
    """Return the slots of other ranks: a view if they are adjacent, else a copy."""
    if local_slots is None:
        return values
    before, after = values[: local_slots.start], values[local_slots.stop :]
    return torch.cat([before, after]) if len(before) and len(after) else before if len(before) else after


def write_remote_slots(target: torch.Tensor, values: torch.Tensor, local_slots: range | None) -> None:
    """Write values (L, ...) to the slots of other ranks in a target (P, ...); the inverse of :func:`remote_slots`."""
    if local_slots is None:
        target.copy_(values)
        return
    if local_slots.start > 0:
        target[: local_slots.start].copy_(values[: local_slots.start])
    if local_slots.start < len(values):
        target[local_slots.stop :].copy_(values[local_slots.start :])
