"""The Triton backend of the kernels, for accelerators: each kernel reads and writes every tensor once.

:mod:`xfuser_cocodiff.engine.kernels` documents the functions. A program processes rows of one head, of one token each,
or of several tokens if heads are small. If three or five values share a byte, columns have gaps, since bytes and the
values of a byte are dims whose sizes are powers of two. Multiply and add are never fused: encoder and decoder must
compute the same bits.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from xfuser_cocodiff.engine.kernels import quantize
from xfuser_cocodiff.engine.kernels.rows import (
    GAIN_BYTES,
    GAIN_STEPS,
    ActiveTokens,
    Base,
    EncodeResult,
    Prediction,
    num_links,
    remote_slots,
    sample_stride,
    view_bytes,
    write_remote_slots,
)

_PER_OCTAVE, _ORIGIN = tl.constexpr(float(quantize.PER_OCTAVE)), tl.constexpr(float(quantize.ORIGIN))
_NOT_FINITE = tl.constexpr(float(quantize.NOT_FINITE))
_PEAK_SHARE = tl.constexpr(quantize.PEAK_SHARE)
_GAIN_STEPS = tl.constexpr(float(GAIN_STEPS))
_MIN_WIDTH = tl.constexpr(torch.finfo(torch.float32).tiny)
"""Replacement for a width of 0 in comparisons."""
_VALUES_PER_PROGRAM = 4096
"""Maximum number of values that a program processes at once."""


@triton.jit
def _locate_program(groups, heads, rows, block_rows: tl.constexpr):
    """Return the head of a program, as a flat index and as link, group and head, and the program's rows of that head.

    A program has one head, so that it divides once and not for each row. The grid has one dim: CUDA limits the other
    dims to 65,535 programs.
    """
    blocks = tl.cdiv(rows, block_rows)
    head_index = tl.program_id(0) // blocks
    pair = head_index // heads
    row = tl.program_id(0) % blocks * block_rows + tl.arange(0, block_rows)
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
def _predict(reference, previous, offsets, inside, gain, predicts: tl.constexpr):
    """Return prediction, reference and last change of the reference, rounded to its type as PyTorch's operations are.

    Args:
        reference: link reference.
        previous: link reference of the step before; not read unless `predicts`.
        offsets: offsets of the values in both.
        inside: mask of the values that exist.
        gain: gain of the link in units of 1 / GAIN_STEPS.
        predicts: whether to extrapolate; else the prediction is the reference.
    """
    current = tl.load(reference + offsets, mask=inside, other=0.0)
    predicted, change = current, current
    if predicts:
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
    dim: tl.constexpr, block_dim: tl.constexpr, block_tokens: tl.constexpr, predicts: tl.constexpr,
):  # fmt: skip
    """Compute the scores of some tokens of one group and link per program, over all heads.

    Args:
        values: (P, G, H, T, D).
        reference: link reference (L, G, H, T, D), contiguous.
        previous: link reference of the step before, of the same shape; not read unless `predicts`.
        gains: uint8 (L); not read unless `predicts`.
        scores: float32 (L, G, T), written: squared distance to the prediction, summed over heads and dims.
        groups, heads, tokens: G, H and T.
        local_start, local_count: first slot of this rank, or L without local slots; number of local slots.
        stride_slot, stride_group, stride_head, stride_token: strides of the values.
        base: base (L, G, H, T, D) that is subtracted from the values, or None.
        weight: weight of the base, or None.
        stride_base_link, stride_base_group, stride_base_head, stride_base_token: strides of the base, or None.
        dim, block_dim: D, and D rounded up to a power of two.
        block_tokens: tokens per program.
        predicts: whether predictions extrapolate.
    """
    blocks, column = tl.cdiv(tokens, block_tokens), tl.arange(0, block_dim)
    pair = tl.program_id(0) // blocks
    token = tl.program_id(0) % blocks * block_tokens + tl.arange(0, block_tokens)
    link, group = pair // groups, pair % groups
    slot = link + (link >= local_start) * local_count
    inside = (token < tokens)[:, None] & (column < dim)[None, :]
    gain = tl.load(gains + link) if predicts else 0
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
        predicted, _, _ = _predict(reference, previous, offset, inside, gain, predicts)
        residual = (value.to(tl.float32) - predicted.to(tl.float32)).to(value.dtype).to(tl.float32)
        total += tl.sum(tl.where(inside, residual * residual, 0.0), 1)
    tl.store(scores + pair.to(tl.int64) * tokens + token, total, mask=token < tokens)


@triton.jit
def _zero_not_finite(values):
    """Return values with zeros in place of those that are not finite, which cannot be a reference."""
    return tl.where(tl.abs(values.to(tl.float32)) < float("inf"), values, 0.0).to(values.dtype)


@triton.jit
def _encode_kernel(
    values, reference, previous, gains, positions, scale_table, payload, new_reference, sums,
    groups, heads, tokens, active, local_start, local_count,
    stride_slot, stride_group, stride_head, stride_token, stride_payload,
    scales_offset, gain_offset, reference_norm, stride_sample,
    base, weight, stride_base_link, stride_base_group, stride_base_head, stride_base_token,
    dim: tl.constexpr, row_tokens: tl.constexpr, levels: tl.constexpr, per_byte: tl.constexpr,
    level_width: tl.constexpr, by_maximum: tl.constexpr,
    byte_columns: tl.constexpr, block: tl.constexpr, block_rows: tl.constexpr,
    has_prediction: tl.constexpr, predicts: tl.constexpr, selects_tokens: tl.constexpr, sends_gain: tl.constexpr,
):  # fmt: skip
    """Encode the rows of one head per program, and write the new reference and the error sums.

    Args:
        values: (P, G, H, T, D).
        reference: link reference (L, G, H, T, D), contiguous; not read without a prediction.
        previous: link reference of the step before, of the same shape; not read unless `predicts`.
        gains: uint8 (L); not read unless `predicts` or `sends_gain`.
        positions: positions of active tokens, int32 (L, G, T); not read unless `selects_tokens`.
        scale_table: scale of each code, float32 (256).
        payload: (P, n), written: uint8, or of the values' type if they are sent unchanged.
        new_reference: (L, G, H, T, D), written.
        sums: float32 (L, programs, 4), written: error energy, value energy, numerator and denominator of the gain.
        groups, heads, tokens: G, H and T.
        active: number of tokens sent per group.
        local_start, local_count: first slot of this rank, or L without local slots; number of local slots.
        stride_slot, stride_group, stride_head, stride_token: strides of the values.
        stride_payload: stride of the payload's slots.
        scales_offset, gain_offset: offsets of the scales and of the gain in a slot's payload.
        reference_norm: inverse of the grid's outer edge with `by_maximum`, else inverse square root of the row size.
        stride_sample: stride over the tokens of which gains are estimated.
        base: base (L, G, H, T, D) that is subtracted from the values, or None.
        weight: weight of the base, or None.
        stride_base_link, stride_base_group, stride_base_head, stride_base_token: strides of the base, or None.
        dim: D.
        row_tokens: tokens per row.
        levels, per_byte, level_width: the grid: number of levels, values per byte, and width at scale 1. With 0 levels
            the values are sent unchanged.
        by_maximum: whether scales follow the row's maximum.
        byte_columns, block, block_rows: columns per byte, columns and rows of a program.
        has_prediction: whether there is a reference; if not, the residual is the value itself.
        predicts: whether predictions extrapolate.
        selects_tokens: whether only active tokens are sent.
        sends_gain: whether the payload carries the gain.
    """
    head_index, link, group, head, row = _locate_program(groups, heads, tokens // row_tokens, block_rows)
    column, _, digit, has_value = _columns(row_tokens * dim, per_byte, byte_columns, block)
    valid = row < tokens // row_tokens
    inside = valid[:, None] & has_value[None, :]
    slot = link + (link >= local_start) * local_count
    token, inner = _tokens(row, column, dim, row_tokens)
    start = _row_start(slot, group, head, token, stride_slot, stride_group, stride_head, stride_token)
    offset = (head_index.to(tl.int64) * tokens + row * row_tokens)[:, None] * dim + column[None, :]
    value = tl.load(values + start + inner[None, :], mask=inside, other=0.0)
    whole = value  # with a base, the value is the difference from here on
    if base is not None:
        subtracted = _load_base(
            base, weight, link, group, head, token, inner[None, :], inside,
            stride_base_link, stride_base_group, stride_base_head, stride_base_token,
        )  # fmt: skip
        value = (value.to(tl.float32) - subtracted).to(value.dtype)
    if has_prediction:
        gain = tl.load(gains + link) if predicts or sends_gain else 0
        predicted, current, change = _predict(reference, previous, offset, inside, gain, predicts)
    position = row
    if selects_tokens:
        position = tl.load(positions + (link * groups + group) * tokens + row, mask=valid, other=0) - 1
    is_sent = valid & (position >= 0)
    sent_row = ((group * heads + head) * (active // row_tokens) + position).to(tl.int64)  # among the link's rows
    message = payload + slot.to(tl.int64) * stride_payload
    if sends_gain:
        tl.store(message.to(tl.pointer_type(tl.uint8)) + gain_offset, gain)  # every program of a link writes the same
    decoded = value
    if levels:
        residual = (value.to(tl.float32) - predicted.to(tl.float32)).to(value.dtype).to(tl.float32)
        residual = tl.where(inside, residual, 0.0)
        energy = tl.sum(residual * residual, 1)
        largest = tl.max(tl.abs(residual), 1)
        if by_maximum:
            code = tl.ceil(tl.log2(largest * reference_norm) * _PER_OCTAVE) + _ORIGIN
        else:
            scale = tl.maximum(tl.sqrt(energy) * reference_norm, largest * _PEAK_SHARE)
            code = tl.floor(tl.log2(scale) * _PER_OCTAVE + _ORIGIN + 0.5)
        code = tl.minimum(tl.maximum(code, 0.0), _NOT_FINITE - 1.0)
        code = tl.where(energy < float("inf"), code, _NOT_FINITE).to(tl.int32)
        width = tl.load(scale_table + code)[:, None] * level_width
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
        tl.store(message + scales_offset + sent_row, code.to(tl.uint8), mask=is_sent)
    else:
        tl.store(message + (sent_row * dim)[:, None] + column[None, :], value, mask=is_sent[:, None] & inside)
    if selects_tokens:
        decoded = tl.where(is_sent[:, None], decoded, predicted)
    if has_prediction:
        tl.store(new_reference + offset, decoded, mask=inside)
        error = (value.to(tl.float32) - decoded.to(tl.float32)).to(value.dtype).to(tl.float32)
        exact = whole.to(tl.float32)
        program_sums = sums + 4 * tl.program_id(0)
        tl.store(program_sums, tl.sum(tl.where(inside, error * error, 0.0)))
        tl.store(program_sums + 1, tl.sum(tl.where(inside, exact * exact, 0.0)))
        if predicts:
            sampled, delta = inside & (token % stride_sample == 0), change.to(tl.float32)
            coded = value.to(tl.float32)
            tl.store(program_sums + 2, tl.sum(tl.where(sampled, (coded - current.to(tl.float32)) * delta, 0.0)))
            tl.store(program_sums + 3, tl.sum(tl.where(sampled, delta * delta, 0.0)))
    else:
        tl.store(new_reference + offset, _zero_not_finite(value), mask=inside)


@triton.jit
def _sums_kernel(sums, energies, gains, links, programs, predicts: tl.constexpr, block: tl.constexpr):
    """Reduce the sums of all programs to energies and gains, in a single program.

    Args:
        sums: float32 (L, programs, 4), as `_encode_kernel` writes it.
        energies: float32 (2), written: error energy and value energy.
        gains: uint8 (L), written with the gain of each link if `predicts`.
        links: L.
        programs: number of programs per link.
        predicts: whether there are gains.
        block: number of sums that are read at once.
    """
    index = tl.arange(0, block)
    error_energy, value_energy = tl.zeros([block], tl.float32), tl.zeros([block], tl.float32)
    for link in range(links):
        numerator, denominator = tl.zeros([block], tl.float32), tl.zeros([block], tl.float32)
        for first in range(0, programs, block):
            program_sums = sums + 4 * (link * programs + first + index)
            inside = first + index < programs
            error_energy += tl.load(program_sums, mask=inside, other=0.0)
            value_energy += tl.load(program_sums + 1, mask=inside, other=0.0)
            if predicts:
                numerator += tl.load(program_sums + 2, mask=inside, other=0.0)
                denominator += tl.load(program_sums + 3, mask=inside, other=0.0)
        if predicts:
            gain = tl.floor(tl.sum(numerator) / tl.sum(denominator) * _GAIN_STEPS + 0.5)
            gain = tl.where(gain == gain, tl.minimum(tl.maximum(gain, 0.0), _GAIN_STEPS), 0.0)
            tl.store(gains + link, gain.to(tl.uint8))
    tl.store(energies, tl.sum(error_energy))
    tl.store(energies + 1, tl.sum(value_energy))


@triton.jit
def _decode_kernel(
    payload, reference, previous, gains, positions, scale_table, new_reference, target,
    groups, heads, tokens, active, local_start, local_count,
    stride_slot, stride_group, stride_head, stride_token, stride_payload, scales_offset, gain_offset,
    base, weight, stride_base_link, stride_base_group, stride_base_head, stride_base_token,
    dim: tl.constexpr, row_tokens: tl.constexpr, levels: tl.constexpr, per_byte: tl.constexpr,
    level_width: tl.constexpr, byte_columns: tl.constexpr, block: tl.constexpr, block_rows: tl.constexpr,
    has_prediction: tl.constexpr, predicts: tl.constexpr, selects_tokens: tl.constexpr, sends_gain: tl.constexpr,
):  # fmt: skip
    """Decode the rows of one head per program into the new reference and the target.

    Args:
        payload: (P, n): uint8, or of the values' type if they are sent unchanged.
        reference: link reference (L, G, H, T, D), contiguous; not read without a prediction.
        previous: link reference of the step before, of the same shape; not read unless `predicts`.
        gains: uint8 (L); not read unless `predicts`, or if the payload carries the gain.
        positions: positions of active tokens, int32 (L, G, T); not read unless `selects_tokens`.
        scale_table: scale of each code, float32 (256).
        new_reference: (L, G, H, T, D), written.
        target: (P, G, H, T, D), written except for the local slots.
        groups, heads, tokens: G, H and T.
        active: number of tokens sent per group.
        local_start, local_count: first slot of this rank, or L without local slots; number of local slots.
        stride_slot, stride_group, stride_head, stride_token: strides of the target.
        stride_payload: stride of the payload's slots.
        scales_offset, gain_offset: offsets of the scales and of the gain in a slot's payload.
        base: base (L, G, H, T, D) that is added to the decoded values in the target, or None.
        weight: weight of the base, or None.
        stride_base_link, stride_base_group, stride_base_head, stride_base_token: strides of the base, or None.
        dim: D.
        row_tokens: tokens per row.
        levels, per_byte, level_width: the grid: number of levels, values per byte, and width at scale 1. With 0 levels
            the values are sent unchanged.
        byte_columns, block, block_rows: columns per byte, columns and rows of a program.
        has_prediction: whether there is a reference; if not, the residual is the value itself.
        predicts: whether predictions extrapolate.
        selects_tokens: whether only active tokens are sent.
        sends_gain: whether the payload carries the gain.
    """
    head_index, link, group, head, row = _locate_program(groups, heads, tokens // row_tokens, block_rows)
    column, byte, digit, has_value = _columns(row_tokens * dim, per_byte, byte_columns, block)
    valid = row < tokens // row_tokens
    inside = valid[:, None] & has_value[None, :]
    offset = (head_index.to(tl.int64) * tokens + row * row_tokens)[:, None] * dim + column[None, :]
    slot = link + (link >= local_start) * local_count
    message = payload + slot.to(tl.int64) * stride_payload
    if has_prediction:
        if sends_gain:
            gain = tl.load(message.to(tl.pointer_type(tl.uint8)) + gain_offset)
        else:
            gain = tl.load(gains + link) if predicts else 0
        predicted, _, _ = _predict(reference, previous, offset, inside, gain, predicts)
    position = row
    if selects_tokens:
        position = tl.load(positions + (link * groups + group) * tokens + row, mask=valid, other=0) - 1
    is_sent = valid & (position >= 0)
    sent_row = ((group * heads + head) * (active // row_tokens) + position).to(tl.int64)
    if levels:
        code = tl.load(message + scales_offset + sent_row, mask=is_sent, other=0).to(tl.int32)
        row_bytes: tl.constexpr = (row_tokens * dim + per_byte - 1) // per_byte
        byte_pointers = message + (sent_row * row_bytes)[:, None] + byte[None, :]
        packed = tl.load(byte_pointers, mask=is_sent[:, None] & inside, other=0).to(tl.int32)
        if byte_columns == per_byte:  # a power of two: digits are bit fields
            level = (packed >> (digit * (8 // per_byte))[None, :]) & (levels - 1)
        else:
            level = packed // _weight(digit, levels, per_byte)[None, :] % levels
        decoded = _dequantize(level, tl.load(scale_table + code)[:, None] * level_width, predicted, (levels - 1) / 2)
    else:
        pointers = message + (sent_row * dim)[:, None] + column[None, :]
        decoded = tl.load(pointers, mask=is_sent[:, None] & inside, other=0.0)
    if selects_tokens:
        decoded = tl.where(is_sent[:, None], decoded, predicted)
    if has_prediction:
        tl.store(new_reference + offset, decoded, mask=inside)
    else:
        tl.store(new_reference + offset, _zero_not_finite(decoded), mask=inside)
    token, inner = _tokens(row, column, dim, row_tokens)
    start = _row_start(slot, group, head, token, stride_slot, stride_group, stride_head, stride_token)
    if base is not None:
        added = _load_base(
            base, weight, link, group, head, token, inner[None, :], inside,
            stride_base_link, stride_base_group, stride_base_head, stride_base_token,
        )  # fmt: skip
        decoded = (added + decoded.to(tl.float32)).to(decoded.dtype)
    tl.store(target + start + inner[None, :], decoded, mask=inside)


def scores(
    values: torch.Tensor, prediction: Prediction, local_slots: range | None, base: Base | None = None
) -> torch.Tensor:
    """Return the squared distance of each token from its prediction; see the package."""
    values, reference = _with_contiguous_rows(values), prediction.reference
    links, groups, heads, tokens, dim = reference.shape
    found = torch.empty(links, groups, tokens, device=values.device)
    block_dim = triton.next_power_of_2(dim)
    block = max(1, min(64, _VALUES_PER_PROGRAM // block_dim))
    _scores_kernel[(links * groups * triton.cdiv(tokens, block),)](
        values, reference, _or(prediction.previous, reference), _or(prediction.gains, reference), found,
        groups, heads, tokens, *_local_arguments(local_slots, links), *values.stride()[:4],
        *_base_arguments(base), dim, block_dim, block, prediction.previous is not None, enable_fp_fusion=False,
    )  # fmt: skip
    return found


def encode(
    values: torch.Tensor,
    prediction: Prediction | None,
    bits: float | None,
    active: ActiveTokens | None,
    payload: torch.Tensor,
    local_slots: range | None,
    sends_gain: bool = False,
    base: Base | None = None,
) -> EncodeResult:
    """Encode values and write the payload; see the package."""
    values = _with_contiguous_rows(values)
    slots, *sizes = values.shape
    links = num_links(slots, local_slots)
    out = values.new_empty(links, *sizes)
    launch, grid = _Launch.of(out.shape, bits, active, payload, values.dtype), _grid(bits)
    reference, previous, gains = prediction or (None, None, None)
    sums = torch.empty(*launch.programs, 4, device=values.device) if prediction else None
    reference_norm = 1 / grid.reach if grid.by_maximum else (launch.row_tokens * sizes[-1]) ** -0.5
    _encode_kernel[launch.grid](
        values, _or(reference, out), _or(previous, out), _or(gains, out), _or(active and active.positions, out),
        quantize.scale_table(values.device), launch.payload, out, _or(sums, out),
        *sizes[:3], launch.active, *_local_arguments(local_slots, links),
        *values.stride()[:4], launch.payload.stride(0),
        launch.scales_offset, launch.gain_offset, reference_norm, sample_stride(sizes[2]), *_base_arguments(base),
        sizes[-1], launch.row_tokens, grid.levels, grid.per_byte, grid.width, grid.by_maximum,
        launch.byte_columns, launch.block, launch.block_rows,
        prediction is not None, previous is not None, active is not None, sends_gain,
        enable_fp_fusion=False,
    )  # fmt: skip
    if sums is None:
        return EncodeResult(out)
    energies = torch.empty(2, device=values.device)
    next_gains = None if previous is None else torch.empty(links, dtype=torch.uint8, device=values.device)
    _sums_kernel[(1,)](sums, energies, _or(next_gains, out), *launch.programs, previous is not None, 1024)
    return EncodeResult(out, energies[0], energies[1], next_gains)


def decode(
    payload: torch.Tensor,
    prediction: Prediction | None,
    bits: float | None,
    active: ActiveTokens | None,
    target: torch.Tensor,
    local_slots: range | None,
    sends_gain: bool = False,
    base: Base | None = None,
) -> torch.Tensor:
    """Decode a payload into the target and return the new link reference; see the package."""
    landing = target if target.stride(-1) == 1 else torch.empty_like(target, memory_format=torch.contiguous_format)
    slots, *sizes = target.shape
    links = num_links(slots, local_slots)
    out = target.new_empty(links, *sizes)
    launch, grid = _Launch.of(out.shape, bits, active, payload, target.dtype), _grid(bits)
    reference, previous, gains = prediction or (None, None, None)
    _decode_kernel[launch.grid](
        launch.payload, _or(reference, out), _or(previous, out), _or(gains, out),
        _or(active and active.positions, out), quantize.scale_table(target.device), out, landing,
        *sizes[:3], launch.active, *_local_arguments(local_slots, links),
        *landing.stride()[:4], launch.payload.stride(0),
        launch.scales_offset, launch.gain_offset, *_base_arguments(base),
        sizes[-1], launch.row_tokens, grid.levels, grid.per_byte, grid.width,
        launch.byte_columns, launch.block, launch.block_rows,
        prediction is not None, previous is not None, active is not None, sends_gain,
        enable_fp_fusion=False,
    )  # fmt: skip
    if landing is not target:
        write_remote_slots(target, remote_slots(landing, local_slots), local_slots)
    return out


_NO_GRID = quantize.Grid(0, 1, 0.0)
"""Grid of values that are sent unchanged."""


def _grid(bits: float | None) -> quantize.Grid:
    """Return the grid for bits per value, or that of unchanged values for None."""
    return _NO_GRID if bits is None else quantize.GRIDS[bits]


class _Launch(NamedTuple):
    """Launch sizes and payload offsets for values (L, G, H, T, D)."""

    programs: tuple[int, int]
    """L, and number of programs per link."""
    row_tokens: int
    """Tokens per row."""
    byte_columns: int
    """Columns per byte."""
    block: int
    """Columns of a program, some of them gaps."""
    block_rows: int
    """Rows of a program."""
    active: int
    """Number of tokens sent per group."""
    payload: torch.Tensor
    """Payload in the type in which it is accessed."""
    scales_offset: int
    """Offset of the scales in a slot's payload."""
    gain_offset: int
    """Offset of the gain in a slot's payload, in bytes."""

    @classmethod
    def of(
        cls,
        shape: torch.Size,
        bits: float | None,
        active: ActiveTokens | None,
        payload: torch.Tensor,
        dtype: torch.dtype,
    ) -> "_Launch":
        """Return the launch for a codec and its payload.

        Args:
            shape: (L, G, H, T, D).
            bits: bits per value; None to send values unchanged.
            active: tokens that are sent; None for all.
            payload: uint8 (P, n).
            dtype: type of the values.

        Raises:
            ValueError: the bytes of a slot's payload are not contiguous.
        """
        links, groups, heads, tokens, dim = shape
        sent = tokens if active is None else active.count
        row_tokens = 1 if bits is None else quantize.tokens_per_row(bits, dim, tokens, active is None)
        per_byte = _grid(bits).per_byte
        row_bytes = triton.cdiv(row_tokens * dim, per_byte)
        byte_columns = triton.next_power_of_2(per_byte)
        block = triton.next_power_of_2(row_bytes) * byte_columns
        row_count = tokens // row_tokens
        block_rows = max(1, min(_VALUES_PER_PROGRAM // block, triton.next_power_of_2(row_count)))
        if payload.stride(-1) != 1:
            raise ValueError(f"the bytes of a payload must be contiguous; its strides are {payload.stride()}")
        gain_offset = payload.shape[1] - GAIN_BYTES
        payload = view_bytes(payload, dtype) if bits is None else payload
        scales_offset = groups * heads * sent // row_tokens * row_bytes
        programs = links, groups * heads * triton.cdiv(row_count, block_rows)
        return cls(programs, row_tokens, byte_columns, block, block_rows, sent, payload, scales_offset, gain_offset)

    @property
    def grid(self) -> tuple[int]:
        """Total number of programs."""
        return (math.prod(self.programs),)


def _with_contiguous_rows(values: torch.Tensor) -> torch.Tensor:
    """Return values whose last dim is contiguous, as a copy if need be."""
    return values if values.stride(-1) == 1 else values.contiguous()


def _local_arguments(local_slots: range | None, links: int) -> tuple[int, int]:
    """Return the kernels' arguments `local_start` and `local_count`."""
    return (links, 0) if local_slots is None else (local_slots.start, len(local_slots))


_NO_BASE = (None,) * 6
"""The kernels' arguments without a base. Triton compiles None as a constant, so that the code has no trace of them."""


def _base_arguments(base: Base | None) -> tuple[torch.Tensor | float | int | None, ...]:
    """Return the kernels' arguments from `base` to `stride_base_token`."""
    if base is None:
        return _NO_BASE
    values = _with_contiguous_rows(base.values)
    return values, float(base.weight), *values.stride()[:4]


def _or(tensor: torch.Tensor | None, placeholder: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a placeholder for one that the kernel does not read."""
    return placeholder if tensor is None else tensor
