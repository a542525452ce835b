"""Tensors of a message on the device: the arguments of the Triton kernels, and where a program finds its rows.

A row is a token of a head, or several tokens if heads are small. A program processes some rows of a link, tile by tile;
all of them are sent, or none is. Multiply and add are never fused: encoder and decoder must compute the same bits.
"""

import dataclasses
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from xfuser_cocodiff.engine.kernels.rows import GAIN_STEPS

UNIT_GAIN = tl.constexpr(float(GAIN_STEPS))
"""A gain of 1, as it is sent and stored."""


@dataclasses.dataclass(frozen=True, eq=False)
class CodecConstants:
    """How a tensor is encoded, as constants of the compiler.

    A launch hashes only the identity of these objects. They are an argument of their own: before Triton 3.7 a tuple of
    TensorArguments has no length, and 3.5 loses the constants within.
    """

    levels: tl.constexpr
    """Number of quantization levels; 0 if values are sent unchanged."""
    per_byte: tl.constexpr
    """Values per byte."""
    level_width: tl.constexpr
    """Width of a level at scale 1."""
    by_maximum: tl.constexpr
    """Whether scales follow the row's maximum."""
    dim: tl.constexpr
    """D."""
    row_tokens: tl.constexpr
    """Tokens per row."""
    is_across_rows: tl.constexpr
    """Whether the values of a byte are those of adjacent rows in one column, not of adjacent columns."""
    block: tl.constexpr
    """Columns of a tile: values of a row, rounded up to a power of two."""
    block_rows: tl.constexpr
    """Rows of a tile."""
    tiles: tl.constexpr
    """Tiles of a program; if bytes go across rows, tile k has the k-th row of each byte."""
    per_octave: tl.constexpr
    """PER_OCTAVE of :mod:`quantize`, as are the next three; a launch compares global variables of kernels in Python."""
    origin: tl.constexpr
    not_finite: tl.constexpr
    peak_share: tl.constexpr
    min_width: tl.constexpr
    """Replacement for a width of 0 in comparisons."""


def unspecialized(size: int) -> int:
    """Return the argument that stands for a size.

    Triton compiles a kernel anew for integers that are 1 and for those that are divisible by 16. So kernels would be
    compiled for each number of tokens, samples and ranks, for seconds in the middle of a run. An odd number from 3 is
    neither.
    """
    return 2 * size + 3


def size_of(argument: int) -> int:
    """Return the size that an argument stands for: the inverse of :func:`unspecialized`."""
    return (argument - 3) // 2


class TensorArguments(NamedTuple):
    """A tensor of a message, as the kernels get it. Triton compiles fields that are None as constants.

    Sizes, offsets and numbers are passed by :func:`unspecialized`. Strides are not, since those that are divisible by
    16 allow 16-byte accesses, nor is `tiles`, which the codec determines.
    """

    data: torch.Tensor
    """Values to encode, or target of the decoder, (P, G, H, T, D); D is contiguous. A field `values` would be hidden by
    an attribute of Triton's tuples."""
    stride_slot: int
    stride_group: int
    stride_head: int
    stride_token: int
    base: torch.Tensor | None
    """Base (L, G, H, T, D) that is subtracted before encoding and added after decoding; D is contiguous."""
    weight: float | None
    """Weight of the base."""
    stride_base_link: int | None
    stride_base_group: int | None
    stride_base_head: int | None
    stride_base_token: int | None
    reference: torch.Tensor | None
    """Link reference (L, G, H, T, D), contiguous; None if values are sent without a prediction."""
    previous: torch.Tensor | None
    """Link reference of the step before; None to predict the reference itself."""
    gains: torch.Tensor | None
    """uint8 (L)."""
    channel_scales: torch.Tensor | None
    """Scales of channels, powers of two, float32 (L, H, D); None for ones."""
    order: torch.Tensor | None
    """Active tokens and then the others of each group, int32 (L, G, T); None if all are sent."""
    payload: torch.Tensor
    """(P, n): uint8, or of the values' type if they are sent unchanged."""
    stride_payload: int
    """Stride of the payload's slots."""
    scales_offset: int
    """Offset of the scales in a slot's payload."""
    gain_offset: int | None
    """Offset of the gain in a slot's payload; None if it carries none."""
    new_reference: torch.Tensor
    """(L, G, H, T, D), contiguous, written."""
    links: int
    groups: int
    heads: int
    tokens: int
    active: int
    """Number of tokens sent per group."""
    local_start: int
    """First slot of this rank, or L without local slots."""
    local_count: int
    """Number of local slots."""
    programs: int
    """Number of programs of this tensor, a multiple of L."""
    tiles: int
    """Tiles of a program; not a constant, so that loops are not unrolled, which would take registers."""
    next_gains: torch.Tensor | None = None
    """Gains for the next step, uint8 (L), written by the encoder if there is a previous reference."""
    reference_norm: float | None = None
    """For the encoder: inverse of the grid's outer edge if scales follow the maximum, else inverse square root of the
    row size."""
    stride_sample: int | None = None
    """For the encoder: stride over the tokens of which gains are estimated."""


@triton.jit
def read_size(passed):
    """Return a size from the argument that stands for it, see :func:`unspecialized`."""
    return (passed - 3) >> 1


@triton.jit
def locate_program(tensor, codec: tl.constexpr, program):
    """Return the link of a program, its number among those of the link, and how many of these send rows."""
    rows_per_program: tl.constexpr = codec.block_rows * codec.tiles
    rows = read_size(tensor.groups) * read_size(tensor.heads) * (read_size(tensor.active) // codec.row_tokens)
    programs = read_size(tensor.programs) // read_size(tensor.links)
    return program // programs, program % programs, tl.cdiv(rows, rows_per_program)


@triton.jit
def locate_rows(tensor, codec: tl.constexpr, link, number, tile, sends: tl.constexpr):
    """Return where the rows of a tile are.

    Args:
        tensor: the tensor.
        codec: its CodecConstants.
        link: link of the rows.
        number: number of the program among those of the link whose rows are sent, or are not.
        tile: number of the tile in the program.
        sends: whether the rows are sent.

    Returns:
        Index of each row among those of the link that are sent, or are not; whether it exists; its group, head and
        first token; and the offset of its first value in a reference.
    """
    index = tl.arange(0, codec.block_rows)
    if codec.is_across_rows:
        row = (number * codec.block_rows + index) * codec.tiles + tile
    else:
        row = (number * codec.tiles + tile) * codec.block_rows + index
    groups, heads, tokens = read_size(tensor.groups), read_size(tensor.heads), read_size(tensor.tokens)
    sent = read_size(tensor.active) // codec.row_tokens
    of_head = sent if sends else tokens - sent
    pair = row // of_head
    group, head, position = pair // heads, pair % heads, row % of_head
    valid = pair < groups * heads
    token = position * codec.row_tokens
    if tensor.order is not None:
        first = 0 if sends else sent
        order = tensor.order + (link * groups + group) * tokens
        token = tl.load(order + first + position, mask=valid, other=0)
    start = (link * groups * heads + pair).to(tl.int64) * tokens + token
    return row, valid, group, head, token, start * codec.dim


@triton.jit
def tokens_of(token, column, dim: tl.constexpr, row_tokens: tl.constexpr):
    """Return the token of each value of rows with these first tokens, and the value's index in the token."""
    if row_tokens == 1:
        of_value, inner = token[:, None], column
    else:
        of_value, inner = token[:, None] + (column // dim)[None, :], column % dim
    return of_value, inner


@triton.jit
def row_start(slot, group, head, token, stride_slot, stride_group, stride_head, stride_token):
    """Return the offset of a token's values in a tensor of any strides."""
    group_start = slot.to(tl.int64) * stride_slot + group.to(tl.int64) * stride_group
    return group_start + head.to(tl.int64) * stride_head + token.to(tl.int64) * stride_token


@triton.jit
def predict(reference, previous, offsets, inside, gain):
    """Return prediction, reference and last change of the reference, rounded to its type as PyTorch's operations are.

    Args:
        reference: link reference.
        previous: link reference of the step before; None to predict the reference itself.
        offsets: offsets of the values in both.
        inside: mask of the values that exist.
        gain: gain of the link in units of 1 / GAIN_STEPS.
    """
    current = tl.load(reference + offsets, mask=inside, other=0.0)
    predicted, change = current, current
    if previous is not None:
        before = tl.load(previous + offsets, mask=inside, other=0.0)
        change = (current.to(tl.float32) - before.to(tl.float32)).to(current.dtype)
        factor = (gain.to(tl.float32) / UNIT_GAIN).to(current.dtype)
        step = (factor.to(tl.float32) * change.to(tl.float32)).to(current.dtype)
        predicted = (step.to(tl.float32) + current.to(tl.float32)).to(current.dtype)
    return predicted, current, change


@triton.jit
def load_channel_scales(tensor, dim: tl.constexpr, link, head, inner, inside):
    """Return the scales of the channels of rows, float32 (rows, columns); `inner` are the channels of the columns."""
    start = (link * read_size(tensor.heads) + head) * dim
    return tl.load(tensor.channel_scales + start[:, None] + inner[None, :], mask=inside, other=1.0)


@triton.jit
def divide_by_power(values, scales):
    """Return values divided by powers of two: times the inverse, of the negated exponent (0x7F000000: 2 x 127)."""
    return values * (0x7F000000 - scales.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def dequantize(level, width, scales, predicted, middle: tl.constexpr):
    """Return the values that both ends decode from levels, added to their prediction.

    Args:
        level: level of each value.
        width: width of the levels of each row.
        scales: scales of the channels, or 1.
        predicted: predictions.
        middle: level of zero.
    """
    residual = (level.to(tl.float32) - middle) * width * scales
    return (residual + predicted.to(tl.float32)).to(predicted.dtype)


@triton.jit
def load_base(
    base, weight, link, group, head, token, inner, inside, stride_link, stride_group, stride_head, stride_token
):
    """Return values of a base times its weight, float32; `inner` are their indices in the tokens."""
    start = row_start(link, group, head, token, stride_link, stride_group, stride_head, stride_token)
    return tl.load(base + start + inner, mask=inside, other=0.0).to(tl.float32) * weight


@triton.jit
def zero_not_finite(values):
    """Return values with zeros in place of those that are not finite, which cannot be a reference."""
    return tl.where(tl.abs(values.to(tl.float32)) < float("inf"), values, 0.0).to(values.dtype)
