"""Tensors of a message on the device: the arguments of the Triton kernels, and where a program finds its rows.

A program has some units of two bytes in each column, and so `per_unit` tiles of rows: tile k has the k-th row of each
unit. Multiply and add are never fused: encoder and decoder must compute the same bits.
"""

import dataclasses
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from xfuser_cocodiff.engine.codec.rows import GAIN_STEPS

UNIT_GAIN = tl.constexpr(float(GAIN_STEPS))
"""A gain of 1, as it is sent and stored."""
NUM_CODES = tl.constexpr(256)
"""Entries of each table of scales."""


@dataclasses.dataclass(frozen=True, eq=False)
class RowShape:
    """Shape of rows and tiles, constants of the compiler.

    A launch hashes the identity of these objects. They are an argument of their own, since Triton 3.5 loses the
    constants within tuples such as TensorArguments.
    """

    dim: tl.constexpr
    """D."""
    row_tokens: tl.constexpr
    """Tokens per row."""
    block: tl.constexpr
    """Columns of a tile: values of a row, rounded up to a power of two."""
    block_rows: tl.constexpr
    """Rows of a tile."""


def unspecialized(size: int) -> int:
    """Return the argument that stands for a size.

    Triton compiles another variant of a kernel for integers that are 1 and for those that are divisible by 16. So
    kernels would be compiled for each number of tokens, samples and ranks, for seconds in the middle of a run. An odd
    number from 3 is neither.
    """
    return 2 * size + 3


def size_of(argument: int) -> int:
    """Return the size that an argument stands for: the inverse of :func:`unspecialized`."""
    return (argument - 3) // 2


class TensorArguments(NamedTuple):
    """A tensor of a message, as the kernels get it. Triton compiles fields that are None as constants.

    Sizes, offsets and numbers are passed by :func:`unspecialized`. Strides are not, since those that are divisible by
    16 allow 16-byte accesses.
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
    stride_base_link: int | None
    stride_base_group: int | None
    stride_base_head: int | None
    stride_base_token: int | None
    reference: torch.Tensor | None
    """Levels of the link reference, int8 (L, R, N); None for a keyframe, whose prediction is zero. The new reference
    may be written to its memory or to that of the one before: a program writes the rows that it has read."""
    reference_codes: torch.Tensor | None
    """Codes of its rows, uint8 (L, R)."""
    previous: torch.Tensor | None
    """Levels of the link reference of the step before; None to predict the reference itself."""
    previous_codes: torch.Tensor | None
    gains: torch.Tensor | None
    """uint8 (L); the encoder replaces them if there is a previous reference."""
    payload: torch.Tensor
    """uint8 (P, n)."""
    stride_payload: int
    """Stride of the payload's slots."""
    new_reference: torch.Tensor
    """int8 (L, R, N), written."""
    new_codes: torch.Tensor
    """uint8 (L, R), written."""
    scales_offset: int
    """Offset of the scales in a slot's payload."""
    gain_offset: int | None
    """Offset of the gain in a slot's payload; None if it carries none."""
    links: int
    groups: int
    heads: int
    tokens: int
    local_start: int
    """First slot of this rank, or L without local slots."""
    local_count: int
    """Number of local slots."""
    programs: int
    """Number of programs of this tensor, a multiple of L."""
    levels: int
    """Number of quantization levels. It is no constant: all bits share a kernel, so that no step waits for one."""
    per_unit: int
    """Rows of a unit."""
    level_width: float
    """Width of a level at scale 1."""
    inverse_levels: float
    norm_weight: float
    """For the encoder: weight of a row's norm in its scale, 0 where scales follow the maximum."""
    peak_weight: float
    """For the encoder: weight of a row's maximum in its scale."""
    rounding: float
    """For the encoder: 0.5 to round codes of scales to the nearest, 1 to round them up."""
    stride_sample: int
    """For the encoder: stride over the tokens of which gains are estimated."""


@triton.jit
def read_size(passed):
    """Return a size from the argument that stands for it, see :func:`unspecialized`."""
    return (passed - 3) >> 1


@triton.jit
def rows_of(tensor, row_tokens: tl.constexpr):
    """Return the number of rows of a link."""
    return read_size(tensor.groups) * read_size(tensor.heads) * (read_size(tensor.tokens) // row_tokens)


@triton.jit
def locate_row(tensor, row, row_tokens: tl.constexpr):
    """Return group, head and first token of rows."""
    of_head = read_size(tensor.tokens) // row_tokens
    pair, heads = row // of_head, read_size(tensor.heads)
    return pair // heads, pair % heads, row % of_head * row_tokens


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
def load_reference(levels, codes, row, offset, valid, inside, widths):
    """Return rows of an int8 reference as float32.

    Args:
        levels, codes: the reference.
        row: number of each row, counted over links.
        offset: offset of the values in the levels.
        valid: which rows exist.
        inside: which values exist.
        widths: width of the levels of each code, float32 (256).
    """
    width = tl.load(widths + tl.load(codes + row, mask=valid, other=0).to(tl.int32))
    return tl.load(levels + offset, mask=inside, other=0).to(tl.float32) * width[:, None]


@triton.jit
def predict(tensor, row, offset, valid, inside, gain, widths):
    """Return prediction, reference and last change of the reference, float32; zeros for a keyframe.

    Args:
        tensor: the tensor.
        row, offset, valid, inside, widths: see :func:`load_reference`.
        gain: gain of the link in units of 1 / GAIN_STEPS.
    """
    current = tl.zeros(offset.shape, tl.float32)
    if tensor.reference is not None:
        current = load_reference(tensor.reference, tensor.reference_codes, row, offset, valid, inside, widths)
    predicted, change = current, current
    if tensor.previous is not None:
        change = current - load_reference(tensor.previous, tensor.previous_codes, row, offset, valid, inside, widths)
        predicted = change * (gain.to(tl.float32) * (1.0 / UNIT_GAIN)) + current
    return predicted, current, change


@triton.jit
def dequantize(level, width, predicted, levels):
    """Return the values that both ends decode from levels, float32.

    Args:
        level: level of each value, float32.
        width: width of the levels of each row.
        predicted: predictions.
        levels: number of levels.
    """
    return (level - (levels - 1).to(tl.float32) * 0.5) * width + predicted


@triton.jit
def load_base(tensor, link, group, head, token, inner, inside):
    """Return values of the base, float32; `inner` are their indices in the tokens."""
    start = row_start(
        link, group, head, token,
        tensor.stride_base_link, tensor.stride_base_group, tensor.stride_base_head, tensor.stride_base_token,
    )  # fmt: skip
    return tl.load(tensor.base + start + inner, mask=inside, other=0.0).to(tl.float32)
