"""The device code of the Triton backend; :mod:`triton_kernels` launches it.

One launch encodes or decodes all tensors of a message: they follow each other in the programs of the grid. A program
processes rows of one head, of one token each, or of several tokens if heads are small. If three or five values share a
byte, columns have gaps, since bytes and the values of a byte are dims whose sizes are powers of two. Multiply and add
are never fused: encoder and decoder must compute the same bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from xfuser_cocodiff.engine.kernels import quantize
from xfuser_cocodiff.engine.kernels.rows import GAIN_STEPS

_PER_OCTAVE, _ORIGIN = tl.constexpr(float(quantize.PER_OCTAVE)), tl.constexpr(float(quantize.ORIGIN))
_NOT_FINITE = tl.constexpr(float(quantize.NOT_FINITE))
_PEAK_SHARE = tl.constexpr(quantize.PEAK_SHARE)
_GAIN_STEPS = tl.constexpr(float(GAIN_STEPS))
_MIN_WIDTH = tl.constexpr(torch.finfo(torch.float32).tiny)
"""Replacement for a width of 0 in comparisons."""
_SUMS_BLOCK = tl.constexpr(1024)
"""Number of programs whose sums are read at once."""


class Code(NamedTuple):
    """How a tensor is encoded, as constants of the compiler."""

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
    byte_columns: tl.constexpr
    """Columns per byte, `per_byte` rounded up to a power of two."""
    block: tl.constexpr
    """Columns of a program, some of them gaps."""
    block_rows: tl.constexpr
    """Rows of a program."""


class TensorArguments(NamedTuple):
    """A tensor of a message, as the kernels get it. Triton compiles fields that are None as constants."""

    strided: torch.Tensor
    """Values to encode, or target of the decoder, (P, G, H, T, D); D is contiguous."""
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
    positions: torch.Tensor | None
    """Positions of active tokens, int32 (L, G, T); None if all are sent."""
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
    code: Code
    next_gains: torch.Tensor | None = None
    """Gains for the next step, uint8 (L), written by the encoder if there is a previous reference."""
    reference_norm: float | None = None
    """For the encoder: inverse of the grid's outer edge if scales follow the maximum, else inverse square root of the
    row size."""
    stride_sample: int | None = None
    """For the encoder: stride over the tokens of which gains are estimated."""


@triton.jit
def _locate_rows(program, groups, heads, rows, block_rows: tl.constexpr):
    """Return the head of a program, as a flat index and as link, group and head, and the program's rows of that head.

    A program has one head, so that it divides once and not for each row.
    """
    blocks = tl.cdiv(rows, block_rows)
    head_index = program // blocks
    pair = head_index // heads
    row = program % blocks * block_rows + tl.arange(0, block_rows)
    return head_index, pair // groups, pair % groups, head_index % heads, row


@triton.jit
def _columns(size, per_byte: tl.constexpr, byte_columns: tl.constexpr, block: tl.constexpr):
    """Return for each column its value in the row, its byte, its digit in the byte, and whether it holds a value.

    Args:
        size: number of values in a row.
        per_byte: values per byte.
        byte_columns: columns per byte, `per_byte` rounded up to a power of two.
        block: number of columns.
    """
    index = tl.arange(0, block)
    byte, digit = index // byte_columns, index % byte_columns
    if per_byte == byte_columns:  # no gaps; the compiler would not infer this from a comparison of digits
        return index, byte, digit, index < size
    column = byte * per_byte + digit
    return column, byte, digit, (digit < per_byte) & (column < size)


@triton.jit
def _tokens(row, column, dim: tl.constexpr, row_tokens: tl.constexpr):
    """Return the token of each value of the rows, and the value's index in the token."""
    if row_tokens == 1:
        token, inner = row[:, None], column
    else:
        token, inner = row[:, None] * row_tokens + (column // dim)[None, :], column % dim
    return token, inner


@triton.jit
def _weight(digit, levels: tl.constexpr, per_byte: tl.constexpr):
    """Return the weight of each digit in its byte, `levels` to the power of the digit."""
    weight = tl.full(digit.shape, 1, tl.int32)
    for exponent in tl.static_range(1, per_byte):
        weight = tl.where(digit >= exponent, weight * levels, weight)
    return weight


@triton.jit
def _row_start(slot, group, head, token, stride_slot, stride_group, stride_head, stride_token):
    """Return the offset of a token's values in a tensor of any strides."""
    group_start = slot.to(tl.int64) * stride_slot + group.to(tl.int64) * stride_group
    return group_start + head.to(tl.int64) * stride_head + token.to(tl.int64) * stride_token


@triton.jit
def _predict(reference, previous, offsets, inside, gain):
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
        factor = (gain.to(tl.float32) / _GAIN_STEPS).to(current.dtype)
        step = (factor.to(tl.float32) * change.to(tl.float32)).to(current.dtype)
        predicted = (step.to(tl.float32) + current.to(tl.float32)).to(current.dtype)
    return predicted, current, change


@triton.jit
def _dequantize(level, width, predicted, middle: tl.constexpr):
    """Return the values that both ends decode from levels, added to their prediction."""
    return ((level.to(tl.float32) - middle) * width + predicted.to(tl.float32)).to(predicted.dtype)


@triton.jit
def _load_base(
    base, weight, link, group, head, token, inner, inside, stride_link, stride_group, stride_head, stride_token
):
    """Return values of a base times its weight, float32; `inner` are their indices in the tokens."""
    start = _row_start(link, group, head, token, stride_link, stride_group, stride_head, stride_token)
    return tl.load(base + start + inner, mask=inside, other=0.0).to(tl.float32) * weight


@triton.jit
def _scores_kernel(
    values, reference, previous, gains, scores,
    groups, heads, tokens, local_start, local_count, stride_slot, stride_group, stride_head, stride_token,
    base, weight, stride_base_link, stride_base_group, stride_base_head, stride_base_token,
    dim: tl.constexpr, block_dim: tl.constexpr, block_tokens: tl.constexpr,
):  # fmt: skip
    """Compute the scores of some tokens of one group and link per program, over all heads.

    Args:
        values: (P, G, H, T, D).
        reference: link reference (L, G, H, T, D), contiguous.
        previous: link reference of the step before, of the same shape; None to predict the reference itself.
        gains: uint8 (L); not read without a previous reference.
        scores: float32 (L, G, T), written: squared distance to the prediction, summed over heads and dims.
        groups, heads, tokens: G, H and T.
        local_start, local_count: first slot of this rank, or L without local slots; number of local slots.
        stride_slot, stride_group, stride_head, stride_token: strides of the values.
        base: base (L, G, H, T, D) that is subtracted from the values, or None.
        weight: weight of the base, or None.
        stride_base_link, stride_base_group, stride_base_head, stride_base_token: strides of the base, or None.
        dim, block_dim: D, and D rounded up to a power of two.
        block_tokens: tokens per program.
    """
    blocks, column = tl.cdiv(tokens, block_tokens), tl.arange(0, block_dim)
    pair = tl.program_id(0) // blocks
    token = tl.program_id(0) % blocks * block_tokens + tl.arange(0, block_tokens)
    link, group = pair // groups, pair % groups
    slot = link + (link >= local_start) * local_count
    inside = (token < tokens)[:, None] & (column < dim)[None, :]
    gain = 0
    if previous is not None:
        gain = tl.load(gains + link)
    total = tl.zeros([block_tokens], tl.float32)
    for head in range(heads):
        offset = ((pair.to(tl.int64) * heads + head) * tokens + token)[:, None] * dim + column[None, :]
        start = _row_start(slot, group, head + 0 * token, token, stride_slot, stride_group, stride_head, stride_token)
        value = tl.load(values + start[:, None] + column[None, :], mask=inside, other=0.0)
        if base is not None:
            subtracted = _load_base(
                base, weight, link, group, head + 0 * token[:, None], token[:, None], column[None, :], inside,
                stride_base_link, stride_base_group, stride_base_head, stride_base_token,
            )  # fmt: skip
            value = (value.to(tl.float32) - subtracted).to(value.dtype)
        predicted, _, _ = _predict(reference, previous, offset, inside, gain)
        residual = (value.to(tl.float32) - predicted.to(tl.float32)).to(value.dtype).to(tl.float32)
        total += tl.sum(tl.where(inside, residual * residual, 0.0), 1)
    tl.store(scores + pair.to(tl.int64) * tokens + token, total, mask=token < tokens)


@triton.jit
def _zero_not_finite(values):
    """Return values with zeros in place of those that are not finite, which cannot be a reference."""
    return tl.where(tl.abs(values.to(tl.float32)) < float("inf"), values, 0.0).to(values.dtype)


@triton.jit
def _encode_kernel(tensors, scale_table, sums, energies, counters):
    """Encode tensors, and write their new references and the sums over their values.

    Args:
        tensors: a TensorArguments for each tensor.
        scale_table: scale of each code, float32 (256).
        sums: float32 (programs, 4): sums of each program.
        energies: float32 (number of tensors, 2), written: error energy and value energy.
        counters: int32 (number of tensors or more): zeros, and zeros again when the kernel ends.
    """
    first = 0
    for number in tl.static_range(len(tensors)):  # a variable for the tensor would hold no constants
        program = tl.program_id(0) - first  # the grid has one dim: CUDA limits the others to 65,535 programs
        if (program >= 0) & (program < tensors[number].programs):
            _encode_rows(tensors[number], program, scale_table, sums + 4 * tl.program_id(0))
            if tensors[number].reference is not None:
                _reduce_in_last_program(tensors[number], sums + 4 * first, energies + 2 * number, counters + number)
        first += tensors[number].programs


@triton.jit
def _encode_rows(tensor, program, scale_table, sums):
    """Encode the rows of a program, all of one head, and write the new reference.

    Args:
        tensor: the tensor.
        program: index of the program among those of the tensor.
        scale_table: scale of each code, float32 (256).
        sums: float32 (4), written: error energy, value energy, numerator and denominator of the gain.
    """
    dim: tl.constexpr = tensor.code.dim
    row_tokens: tl.constexpr = tensor.code.row_tokens
    levels: tl.constexpr = tensor.code.levels
    per_byte: tl.constexpr = tensor.code.per_byte
    byte_columns: tl.constexpr = tensor.code.byte_columns
    block: tl.constexpr = tensor.code.block
    block_rows: tl.constexpr = tensor.code.block_rows
    groups, heads, tokens = tensor.groups, tensor.heads, tensor.tokens
    head_index, link, group, head, row = _locate_rows(program, groups, heads, tokens // row_tokens, block_rows)
    column, _, digit, has_value = _columns(row_tokens * dim, per_byte, byte_columns, block)
    valid = row < tokens // row_tokens
    inside = valid[:, None] & has_value[None, :]
    slot = link + (link >= tensor.local_start) * tensor.local_count
    token, inner = _tokens(row, column, dim, row_tokens)
    start = _row_start(
        slot, group, head, token, tensor.stride_slot, tensor.stride_group, tensor.stride_head, tensor.stride_token
    )
    offset = (head_index.to(tl.int64) * tokens + row * row_tokens)[:, None] * dim + column[None, :]
    value = tl.load(tensor.strided + start + inner[None, :], mask=inside, other=0.0)
    whole = value  # with a base, the value is the difference from here on
    if tensor.base is not None:
        subtracted = _load_base(
            tensor.base, tensor.weight, link, group, head, token, inner[None, :], inside,
            tensor.stride_base_link, tensor.stride_base_group, tensor.stride_base_head, tensor.stride_base_token,
        )  # fmt: skip
        value = (value.to(tl.float32) - subtracted).to(value.dtype)
    message = tensor.payload + slot.to(tl.int64) * tensor.stride_payload
    if tensor.reference is not None:
        gain = 0
        if (tensor.previous is not None) or (tensor.gain_offset is not None):
            gain = tl.load(tensor.gains + link)
        if tensor.gain_offset is not None:  # every program of a link writes the same
            tl.store(message.to(tl.pointer_type(tl.uint8)) + tensor.gain_offset, gain)
        predicted, current, change = _predict(tensor.reference, tensor.previous, offset, inside, gain)
    position = row
    if tensor.positions is not None:
        position = tl.load(tensor.positions + (link * groups + group) * tokens + row, mask=valid, other=0) - 1
    is_sent = valid & (position >= 0)
    sent_row = ((group * heads + head) * (tensor.active // row_tokens) + position).to(tl.int64)  # of the link's rows
    decoded = value
    if levels:
        residual = (value.to(tl.float32) - predicted.to(tl.float32)).to(value.dtype).to(tl.float32)
        residual = tl.where(inside, residual, 0.0)
        energy = tl.sum(residual * residual, 1)
        largest = tl.max(tl.abs(residual), 1)
        if tensor.code.by_maximum:
            code = tl.ceil(tl.log2(largest * tensor.reference_norm) * _PER_OCTAVE) + _ORIGIN
        else:
            scale = tl.maximum(tl.sqrt(energy) * tensor.reference_norm, largest * _PEAK_SHARE)
            code = tl.floor(tl.log2(scale) * _PER_OCTAVE + _ORIGIN + 0.5)
        code = tl.minimum(tl.maximum(code, 0.0), _NOT_FINITE - 1.0)
        code = tl.where(energy < float("inf"), code, _NOT_FINITE).to(tl.int32)
        width = tl.load(scale_table + code)[:, None] * tensor.code.level_width
        if levels > 6:
            level = tl.floor(tl.div_rn(residual, width))
            level = tl.where(level == level, level, 0.0) + levels // 2
            level = tl.minimum(tl.maximum(level, 0.0), levels - 1.0).to(tl.int32)
        else:  # the same result without a division: one comparison per edge between levels
            edge = tl.maximum(width, _MIN_WIDTH)
            level = tl.zeros(residual.shape, tl.int32)
            for number in tl.static_range(1, levels):
                level += (residual >= (number - levels / 2) * edge).to(tl.int32)
            level = tl.where((code == _NOT_FINITE)[:, None], levels // 2, level)
        decoded = _dequantize(level, width, predicted, (levels - 1) / 2)
        digits = tl.where(inside, level, 0) * _weight(digit, levels, per_byte)[None, :]
        packed = tl.sum(tl.reshape(digits, [block_rows, block // byte_columns, byte_columns]), 2)
        byte_index = tl.arange(0, block // byte_columns)
        row_bytes: tl.constexpr = (row_tokens * dim + per_byte - 1) // per_byte
        byte_pointers = message + (sent_row * row_bytes)[:, None] + byte_index[None, :]
        tl.store(byte_pointers, packed.to(tl.uint8), mask=is_sent[:, None] & (byte_index < row_bytes)[None, :])
        tl.store(message + tensor.scales_offset + sent_row, code.to(tl.uint8), mask=is_sent)
    else:
        tl.store(message + (sent_row * dim)[:, None] + column[None, :], value, mask=is_sent[:, None] & inside)
    if tensor.positions is not None:
        decoded = tl.where(is_sent[:, None], decoded, predicted)
    if tensor.reference is not None:
        tl.store(tensor.new_reference + offset, decoded, mask=inside)
        error = (value.to(tl.float32) - decoded.to(tl.float32)).to(value.dtype).to(tl.float32)
        exact = whole.to(tl.float32)
        tl.store(sums, tl.sum(tl.where(inside, error * error, 0.0)))
        tl.store(sums + 1, tl.sum(tl.where(inside, exact * exact, 0.0)))
        if tensor.previous is not None:
            sampled, delta = inside & (token % tensor.stride_sample == 0), change.to(tl.float32)
            moved = value.to(tl.float32) - current.to(tl.float32)
            tl.store(sums + 2, tl.sum(tl.where(sampled, moved * delta, 0.0)))
            tl.store(sums + 3, tl.sum(tl.where(sampled, delta * delta, 0.0)))
    else:
        tl.store(tensor.new_reference + offset, _zero_not_finite(value), mask=inside)


@triton.jit
def _reduce_in_last_program(tensor, sums, energies, counter):
    """Reduce the sums of all programs of a tensor to energies and gains, in the program that ends last.

    The order of the sums is that of the programs: results do not depend on which program is last.

    Args:
        tensor: the tensor.
        sums: float32 (programs, 4): sums of each program.
        energies: float32 (2), written.
        counter: number of programs that have ended, reset by the last one.
    """
    tl.debug_barrier()  # the sums are written
    if tl.atomic_add(counter, 1, sem="acq_rel") == tensor.programs - 1:
        tl.store(counter, 0)
        programs = tensor.programs // tensor.links
        index = tl.arange(0, _SUMS_BLOCK)
        error_energy, value_energy = tl.zeros([_SUMS_BLOCK], tl.float32), tl.zeros([_SUMS_BLOCK], tl.float32)
        for link in range(tensor.links):
            numerator, denominator = tl.zeros([_SUMS_BLOCK], tl.float32), tl.zeros([_SUMS_BLOCK], tl.float32)
            for first in range(0, programs, _SUMS_BLOCK):
                program_sums = sums + 4 * (link * programs + first + index)
                inside = first + index < programs
                error_energy += _load_sum(program_sums, inside)
                value_energy += _load_sum(program_sums + 1, inside)
                if tensor.previous is not None:
                    numerator += _load_sum(program_sums + 2, inside)
                    denominator += _load_sum(program_sums + 3, inside)
            if tensor.previous is not None:
                gain = tl.floor(tl.sum(numerator) / tl.sum(denominator) * _GAIN_STEPS + 0.5)
                gain = tl.where(gain == gain, tl.minimum(tl.maximum(gain, 0.0), _GAIN_STEPS), 0.0)
                tl.store(tensor.next_gains + link, gain.to(tl.uint8))
        tl.store(energies, tl.sum(error_energy))
        tl.store(energies + 1, tl.sum(value_energy))


@triton.jit
def _load_sum(pointers, inside):
    """Return sums of other programs, which this one's first-level cache may not hold."""
    return tl.load(pointers, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def _decode_kernel(tensors, scale_table):
    """Decode tensors into their targets, and write their new references.

    Args:
        tensors: a TensorArguments for each tensor.
        scale_table: scale of each code, float32 (256).
    """
    first = 0
    for number in tl.static_range(len(tensors)):
        program = tl.program_id(0) - first
        if (program >= 0) & (program < tensors[number].programs):
            _decode_rows(tensors[number], program, scale_table)
        first += tensors[number].programs


@triton.jit
def _decode_rows(tensor, program, scale_table):
    """Decode the rows of a program, all of one head, into the new reference and the target."""
    dim: tl.constexpr = tensor.code.dim
    row_tokens: tl.constexpr = tensor.code.row_tokens
    levels: tl.constexpr = tensor.code.levels
    per_byte: tl.constexpr = tensor.code.per_byte
    byte_columns: tl.constexpr = tensor.code.byte_columns
    block: tl.constexpr = tensor.code.block
    block_rows: tl.constexpr = tensor.code.block_rows
    groups, heads, tokens = tensor.groups, tensor.heads, tensor.tokens
    head_index, link, group, head, row = _locate_rows(program, groups, heads, tokens // row_tokens, block_rows)
    column, byte, digit, has_value = _columns(row_tokens * dim, per_byte, byte_columns, block)
    valid = row < tokens // row_tokens
    inside = valid[:, None] & has_value[None, :]
    offset = (head_index.to(tl.int64) * tokens + row * row_tokens)[:, None] * dim + column[None, :]
    slot = link + (link >= tensor.local_start) * tensor.local_count
    message = tensor.payload + slot.to(tl.int64) * tensor.stride_payload
    if tensor.reference is not None:
        gain = 0
        if tensor.gain_offset is not None:
            gain = tl.load(message.to(tl.pointer_type(tl.uint8)) + tensor.gain_offset)
        elif tensor.previous is not None:
            gain = tl.load(tensor.gains + link)
        predicted, _, _ = _predict(tensor.reference, tensor.previous, offset, inside, gain)
    position = row
    if tensor.positions is not None:
        position = tl.load(tensor.positions + (link * groups + group) * tokens + row, mask=valid, other=0) - 1
    is_sent = valid & (position >= 0)
    sent_row = ((group * heads + head) * (tensor.active // row_tokens) + position).to(tl.int64)
    if levels:
        code = tl.load(message + tensor.scales_offset + sent_row, mask=is_sent, other=0).to(tl.int32)
        row_bytes: tl.constexpr = (row_tokens * dim + per_byte - 1) // per_byte
        byte_pointers = message + (sent_row * row_bytes)[:, None] + byte[None, :]
        packed = tl.load(byte_pointers, mask=is_sent[:, None] & inside, other=0).to(tl.int32)
        if byte_columns == per_byte:  # a power of two: digits are bit fields
            level = (packed >> (digit * (8 // per_byte))[None, :]) & (levels - 1)
        else:
            level = packed // _weight(digit, levels, per_byte)[None, :] % levels
        decoded = _dequantize(
            level, tl.load(scale_table + code)[:, None] * tensor.code.level_width, predicted, (levels - 1) / 2
        )
    else:
        pointers = message + (sent_row * dim)[:, None] + column[None, :]
        decoded = tl.load(pointers, mask=is_sent[:, None] & inside, other=0.0)
    if tensor.positions is not None:
        decoded = tl.where(is_sent[:, None], decoded, predicted)
    if tensor.reference is not None:
        tl.store(tensor.new_reference + offset, decoded, mask=inside)
    else:
        tl.store(tensor.new_reference + offset, _zero_not_finite(decoded), mask=inside)
    token, inner = _tokens(row, column, dim, row_tokens)
    start = _row_start(
        slot, group, head, token, tensor.stride_slot, tensor.stride_group, tensor.stride_head, tensor.stride_token
    )
    if tensor.base is not None:
        added = _load_base(
            tensor.base, tensor.weight, link, group, head, token, inner[None, :], inside,
            tensor.stride_base_link, tensor.stride_base_group, tensor.stride_base_head, tensor.stride_base_token,
        )  # fmt: skip
        decoded = (added + decoded.to(tl.float32)).to(decoded.dtype)
    tl.store(tensor.strided + start + inner[None, :], decoded, mask=inside)
