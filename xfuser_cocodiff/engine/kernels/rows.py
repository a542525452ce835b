"""Arguments and results of the kernels: active tokens, predictions, encode results, and views of slots and payloads.

The backends `torch_kernels` (any device) and `triton_kernels` (accelerators) share them. The latter reads and writes
each tensor once. A payload of one backend decodes to the same bits with the other: only the encoder computes scales,
from sums whose order differs between backends.

Sizes in shapes: P slots, one per destination; L links, the slots of other ranks; G groups of tokens, H heads, T tokens,
D head dim. `local_slots` is the contiguous range of slots that belong to this rank and are skipped; None means that all
P slots are links.
"""

import functools
from typing import NamedTuple

import torch


class ActiveTokens:
    """The tokens of each group that are sent; every group sends the same number.

    Each kernel backend reads them in the form that suits it: as an order, as positions or as indices.

    Args:
        mask: uint8 (L, G, T or more); 1 marks a token that is sent.
        tokens: T.
        count: number of tokens sent per group.
    """

    def __init__(self, mask: torch.Tensor, tokens: int, count: int) -> None:
        self.mask, self.tokens, self.count = mask, tokens, count
        self.order: torch.Tensor | None = None
        """Tokens that are sent and then the others, each ascending, int32 (L, G, T); set by Triton's kernels."""

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """Position of each token among those that are sent, counted from 1, or 0 if it is not sent. int32 (L, G, T)."""
        mask = self.mask[..., : self.tokens]
        return mask.cumsum(-1, dtype=torch.int32).mul_(mask)

    @functools.cached_property
    def indices(self) -> torch.Tensor:
        """Indices of the tokens that are sent, ascending. int64 (L, G, count); computed without a device sync."""
        mask = self.mask[..., : self.tokens]
        return mask.sort(dim=-1, descending=True, stable=True).indices[..., : self.count]


class Prediction(NamedTuple):
    """Inputs of the prediction that both ends of a link make: reference + gain * (reference - previous)."""

    reference: torch.Tensor
    """Link reference, contiguous (L, G, H, T, D)."""
    previous: torch.Tensor | None = None
    """Link reference of the step before, of the same shape; None to predict the reference itself."""
    gains: torch.Tensor | None = None
    """Gain of each link in units of 1 / GAIN_STEPS, uint8 (L)."""
    channel_scales: torch.Tensor | None = None
    """Scales by which channels of the residual are divided before they are quantized, powers of two, float32 contiguous
    (L, H, D); None for ones."""


class Base(NamedTuple):
    """Values that are subtracted before encoding and added after decoding, times a weight: those of another branch.

    What is encoded is the difference in float32, rounded to the type of the values. References are of that difference.
    """

    values: torch.Tensor
    """(L, G, H, T, D), of any strides, of the type of the values; indexed by link, not by slot."""
    weight: float
    """Weight of the base in the difference."""


class MessagePart(NamedTuple):
    """A tensor of a message, and how it is encoded."""

    values: torch.Tensor
    """(P, G, H, T, D), of any strides: the values to encode, or the target that decoded values are written to."""
    prediction: Prediction | None
    """Prediction of the values, the same at both ends; None to send all values unchanged. The reference then has zeros
    where values are not finite."""
    bits: float | None
    """Bits per value of the residual, one of quantize.GRIDS; None to send the values themselves."""
    active: ActiveTokens | None
    """Tokens that are sent; None for all."""
    payload: torch.Tensor
    """uint8 (P, n); the local slots are not accessed. The levels of all rows, then their scales; with `bits` None the
    values. Slots may have gaps between them and begin at a multiple of a value's size."""
    local_slots: range | None = None
    """Slots of this rank, which are skipped; None for none."""
    sends_gain: bool = False
    """Whether the payload ends with GAIN_BYTES bytes that carry the gain, which the receiver uses in place of those of
    its prediction."""
    base: Base | None = None
    """Values whose difference is encoded; the prediction is one of the difference. The receiver adds its own, such as
    the decoded values of the sender's base, in float32, and rounds the sum to the type of the values. None to encode
    the values themselves. The payload has the same form."""


GAIN_STEPS = 32
"""Number of steps between a gain of 0 and a gain of 1."""
GAIN_BYTES = 8
"""Bytes at the end of a payload that carry the sender's gain in the first of them; 8 keep values aligned."""
_SAMPLED_TOKENS = 64


def sample_stride(tokens: int) -> int:
    """Return the stride over tokens at which the gain is estimated, so that about 64 of them are read."""
    return max(1, tokens // _SAMPLED_TOKENS)


class EncodeResult(NamedTuple):
    """The sender's new link reference, and the figures that encoding gives."""

    reference: torch.Tensor
    """Values as the receiver decodes them, (L, G, H, T, D); with a base, differences to it."""
    error_energy: torch.Tensor | None = None
    """Sum of squared reconstruction errors, with a base those of the difference; not finite if the values are not. None
    if values are sent losslessly."""
    value_energy: torch.Tensor | None = None
    """Sum of squared values, with a base those of the values themselves."""
    gains: torch.Tensor | None = None
    """Least-squares gain of each link for the next step, uint8 (L); None without a previous reference."""


def check_base(base: Base, bits: float | None, values: torch.Tensor, local_slots: range | None) -> None:
    """Check that a base fits values (P, G, H, T, D) and their codec.

    Raises:
        ValueError: another shape or type, or no bits: values that are sent unchanged have no difference.
    """
    shape = num_links(values.shape[0], local_slots), *values.shape[1:]
    if bits is None:
        raise ValueError("a base for values that are sent unchanged; it needs bits per value")
    if base.values.shape != shape or base.values.dtype != values.dtype:
        found = f"a base of {tuple(base.values.shape)} {base.values.dtype}"
        raise ValueError(f"{found} for values of {shape} {values.dtype}")


def num_links(slots: int, local_slots: range | None) -> int:
    """Return L, the number of slots that belong to other ranks."""
    return slots - len(local_slots or ())


def remote_slots(values: torch.Tensor, local_slots: range | None) -> torch.Tensor:
    """Return the slots of other ranks: a view if they are adjacent, else a copy."""
    if local_slots is None:
        return values
    before, after = values[: local_slots.start], values[local_slots.stop :]
    return torch.cat([before, after]) if len(before) and len(after) else before if len(before) else after


def view_bytes(payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a view of bytes (P, n) as values of a type."""
    # A payload without active tokens is empty, and its rows may be at any address.
    return payload.view(dtype) if payload.shape[1] else payload.new_empty(payload.shape, dtype=dtype)


def write_remote_slots(target: torch.Tensor, values: torch.Tensor, local_slots: range | None) -> None:
    """Write values (L, ...) to the slots of other ranks in a target (P, ...); the inverse of :func:`remote_slots`."""
    if local_slots is None:
        target.copy_(values)
        return
    if local_slots.start > 0:
        target[: local_slots.start].copy_(values[: local_slots.start])
    if local_slots.start < len(values):
        target[local_slots.stop :].copy_(values[local_slots.start :])
