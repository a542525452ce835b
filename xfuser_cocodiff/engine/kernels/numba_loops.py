"""Loops over rows of values, compiled by Numba for CPUs; :mod:`numba_kernels` calls them.

Loops take addresses, strides in values, and numbers: unpacking array arguments would take as long as a small message.
Numba compiles them at their first use on a machine and caches the code. A row is processed in float32 by several short
loops while it is in the cache; each compiles to vector instructions.

An argument `dtype` is a zero of the type that values have in memory: np.float32(0), or np.uint16(0) for bfloat16. An
optional array is passed as address 0 if it is absent.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from xfuser_cocodiff.engine.kernels import quantize
from xfuser_cocodiff.engine.kernels.rows import GAIN_BYTES, GAIN_STEPS

# Numba's cache depends on this file only: if a constant of another file changes, this file has to change too.
_PER_OCTAVE, _ORIGIN = np.float32(quantize.PER_OCTAVE), np.float32(quantize.ORIGIN)
_NOT_FINITE, _MAX_CODE = quantize.NOT_FINITE, np.float32(quantize.NOT_FINITE - 1)
_PEAK_SHARE = np.float32(quantize.PEAK_SHARE)
_ZERO, _HALF, _INF = np.float32(0), np.float32(0.5), np.float32(np.inf)
_GAIN_STEPS = np.float32(GAIN_STEPS)


# Without fastmath, sums and products keep their order: both ends of a link must compute the same bits.
def _jit(function: Callable | None = None, **options: Any) -> Callable:
    """Compile a function without the GIL, and cache its code if a cache folder is writable."""
    if function is None:
        return functools.partial(_jit, **options)
    options |= {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no writable cache folder
        return numba.njit(**options)(function)


# For sums that only the sender computes.
_jit_reassociating = functools.partial(_jit, fastmath={"reassoc"})


def _bf16_to_f32(builder, value):
    """Emit the conversion of bfloat16 bits to float32."""
    bits = builder.shl(builder.zext(value, _I32), _I32(16))
    return builder.bitcast(bits, _F32)


def _f32_to_bf16(builder, value):
    """Emit the conversion of float32 to bfloat16 bits, rounding to nearest even.

    NaNs stay NaNs: those that come from bfloat16 or from an operation have no low bits that could carry over.
    """
    bits = builder.bitcast(value, _I32)
    is_odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    rounded = builder.lshr(builder.add(builder.add(bits, _I32(0x7FFF)), is_odd), _I32(16))
    return builder.trunc(rounded, ir.IntType(16))


_I32, _F32 = ir.IntType(32), ir.FloatType()


def _element_pointer(context, builder, dtype, address, index, inbounds=True):
    """Emit the pointer to an element of an array of `dtype`."""
    pointer = builder.inttoptr(address, context.get_value_type(dtype).as_pointer())
    return builder.gep(pointer, [index], inbounds=inbounds)


@intrinsic
def _load(context, address, index, dtype):
    """Return the value at an index, bfloat16 as float32."""
    is_half = dtype == types.uint16

    def generate(context, builder, signature, args):
        value = builder.load(_element_pointer(context, builder, dtype, *args[:2]))
        return _bf16_to_f32(builder, value) if is_half else value

    return (types.float32 if is_half else dtype)(types.intp, types.intp, dtype), generate


@intrinsic
def _store(context, address, index, dtype, value):
    """Store a value at an index, rounding float32 to bfloat16 if that is the type in memory."""

    def generate(context, builder, signature, args):
        value = _f32_to_bf16(builder, args[3]) if dtype == types.uint16 else args[3]
        builder.store(value, _element_pointer(context, builder, dtype, *args[:2]))

    return types.void(types.intp, types.intp, dtype, types.float32 if dtype == types.uint16 else dtype), generate


@intrinsic
def _store_rounded(context, address, index, dtype, value):
    """Store a value that :func:`_round_to` has rounded already, by truncation."""

    def generate(context, builder, signature, args):
        value = args[3]
        if dtype == types.uint16:
            value = builder.trunc(builder.lshr(builder.bitcast(value, _I32), _I32(16)), ir.IntType(16))
        builder.store(value, _element_pointer(context, builder, dtype, *args[:2]))

    return types.void(types.intp, types.intp, dtype, types.float32 if dtype == types.uint16 else dtype), generate


@intrinsic
def _round_to(context, dtype, value):
    """Return a float32 rounded to the precision of `dtype`."""

    def generate(context, builder, signature, args):
        return _bf16_to_f32(builder, _f32_to_bf16(builder, args[1])) if dtype == types.uint16 else args[1]

    return types.float32(dtype, types.float32), generate


@intrinsic
def _prefetch(context, address, index, dtype):
    """Prefetch the cache line of an element; the address may be out of bounds."""

    def generate(context, builder, signature, args):
        flag, pointer = ir.IntType(32), _element_pointer(context, builder, dtype, args[0], args[1], inbounds=False)
        signature = ir.FunctionType(ir.VoidType(), [pointer.type, flag, flag, flag])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], signature)
        builder.call(prefetch, [pointer, flag(0), flag(3), flag(1)])  # read, highest locality, data cache
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, dtype), generate


_BYTE, _INT, _FLOAT = np.uint8(0), np.int32(0), np.float32(0)
_FLOAT_BYTES = 4
_PREFETCH_ROWS = 4
"""Prefetch distance in rows. Hardware prefetchers follow contiguous memory, but not rows of one head between those of
other heads: without software prefetch, decoding takes twice the time and scores three times."""
_VALUES_PER_LINE = 16
"""Minimum number of values in a cache line."""


@intrinsic
def _stack_buffer(context, size):
    """Return the address of `size` bytes on the caller's stack; must not be called in a loop.

    Arrays would be slower: possibly negative indices turn stores into scatters, and each call counts references.
    """

    def generate(context, builder, signature, args):
        buffer = builder.alloca(ir.IntType(8), args[0])
        buffer.align = 64  # the widest vector register
        return builder.ptrtoint(buffer, context.get_value_type(types.intp))

    return types.intp(size), generate


@_jit
def _prefetch_row(address, start, size, dtype):
    """Prefetch `size` values from index `start`."""
    for i in range(0, size, _VALUES_PER_LINE):
        _prefetch(address, start + i, dtype)


@_jit
def _predict_row(predicted, change, reference, previous, offset, size, gain, dtype):
    """Write the prediction of a row, and the change of its reference since the step before.

    Args:
        predicted: float32 buffer for the prediction.
        change: float32 buffer for the change; not written without a previous reference.
        reference: link reference.
        previous: link reference of the step before, or 0.
        offset: index of the row in both references.
        size: number of values in the row.
        gain: fraction of the change that is added to the reference.
        dtype: type of the references.
    """
    _prefetch_row(reference, offset + _PREFETCH_ROWS * size, size, dtype)
    if previous:
        _prefetch_row(previous, offset + _PREFETCH_ROWS * size, size, dtype)
        for i in range(size):
            current = _load(reference, offset + i, dtype)
            delta = _round_to(dtype, current - _load(previous, offset + i, dtype))
            _store(change, i, _FLOAT, delta)
            _store(predicted, i, _FLOAT, _round_to(dtype, _round_to(dtype, delta * gain) + current))
    else:
        for i in range(size):
            _store(predicted, i, _FLOAT, _load(reference, offset + i, dtype))


@_jit_reassociating
def _load_row(row, values, start, size, dtype):
    """Copy values of a token to a float32 buffer, and return their energy."""
    energy = _ZERO
    for i in range(size):
        value = _load(values, start + i, dtype)
        _store(row, i, _FLOAT, value)
        energy += value * value
    return energy


@_jit_reassociating
def _subtract_row(residual, row, predicted, size, dtype):
    """Write the residual of a row to its prediction, and return its energy."""
    energy = _ZERO
    for i in range(size):
        difference = _round_to(dtype, _load(row, i, _FLOAT) - _load(predicted, i, _FLOAT))
        _store(residual, i, _FLOAT, difference)
        energy += difference * difference
    return energy


@_jit
def _fill_channel_row(channel_row, channels, start, row_tokens, dim):
    """Write the scales of the channels of a row's values."""
    for token in range(row_tokens):
        for i in range(dim):
            _store(channel_row, token * dim + i, _FLOAT, _load(channels, start + i, _FLOAT))


@_jit_reassociating
def _divide_row(residual, channel_row, size):
    """Divide the residual of a row by the scales of its channels, and return its energy."""
    energy = _ZERO
    for i in range(size):
        scaled = _load(residual, i, _FLOAT) / _load(channel_row, i, _FLOAT)
        _store(residual, i, _FLOAT, scaled)
        energy += scaled * scaled
    return energy


@_jit_reassociating
def _store_reference_row(new_reference, offset, row, decoded, size, dtype):
    """Write the decoded row to the new reference, and return the energy of its error to the values."""
    energy = _ZERO
    for i in range(size):
        value = _load(decoded, i, _FLOAT)
        _store_rounded(new_reference, offset + i, dtype, value)
        error = _round_to(dtype, _load(row, i, _FLOAT) - value)
        energy += error * error
    return energy


@_jit_reassociating
def _gain_sums(values, start, values_dtype, reference, offset, change, size, dtype):
    """Return a token's numerator and denominator of the least-squares gain.

    The numerator is the change from the reference to the values, times the reference's last change; the denominator is
    the energy of that last change.
    """
    numerator, denominator = _ZERO, _ZERO
    for i in range(size):
        delta = _load(change, i, _FLOAT)
        numerator += (_load(values, start + i, values_dtype) - _load(reference, offset + i, dtype)) * delta
        denominator += delta * delta
    return numerator, denominator


@_jit
def _max_abs(row, size):
    """Return the largest magnitude in a float32 row."""
    largest = _ZERO
    for i in range(size):
        value = abs(_load(row, i, _FLOAT))
        largest = value if value > largest else largest
    return largest


@_jit
def _scale_code(residual, energy, size, by_maximum, reference_norm):
    """Return the code of a row's scale.

    Args:
        residual: float32 row.
        energy: sum of squares of the row.
        size: number of values in the row.
        by_maximum: whether the scale follows the row's maximum.
        reference_norm: outer edge of the grid with `by_maximum`, else the inverse square root of `size`.
    """
    if by_maximum:
        largest = _max_abs(residual, size)
        if not largest < _INF or energy != energy:
            return _NOT_FINITE
        code = np.ceil(np.log2(largest / reference_norm) * _PER_OCTAVE) + _ORIGIN
    else:
        if not energy < _INF:
            return _NOT_FINITE
        scale, least = np.sqrt(energy) * reference_norm, _PEAK_SHARE * _max_abs(residual, size)
        code = np.rint(np.log2(scale if scale > least else least) * _PER_OCTAVE) + _ORIGIN
    return int(min(max(code, _ZERO), _MAX_CODE))


@_jit
def _quantize_row(digits, decoded, predicted, residual, size, levels, width, dtype):
    """Write the quantized levels of a row, and the row as both ends decode it."""
    half, last, shift = np.float32(levels // 2), np.float32(levels - 1), _HALF if levels % 2 else _ZERO
    middle = np.float32((levels - 1) / 2)
    for i in range(size):
        level = np.floor(_load(residual, i, _FLOAT) / width + shift)
        level = (level if level == level else _ZERO) + half
        level = level if level > _ZERO else _ZERO
        level = level if level < last else last
        _store(digits, i, _BYTE, np.uint8(level))
        _store(decoded, i, _FLOAT, _round_to(dtype, (level - middle) * width + _load(predicted, i, _FLOAT)))


@_jit
def _dequantize_row(decoded, digits, predicted, size, levels, width, dtype):
    """Write the row that received levels decode to. Not in place, which would prevent vector instructions."""
    middle = np.float32((levels - 1) / 2)
    for i in range(size):
        level = np.float32(_load(digits, i, _BYTE))
        _store(decoded, i, _FLOAT, _round_to(dtype, (level - middle) * width + _load(predicted, i, _FLOAT)))


@_jit
def _dequantize_channels(decoded, digits, predicted, channel_row, size, levels, width, dtype):
    """Write the row that levels decode to, times the scales of its channels."""
    middle = np.float32((levels - 1) / 2)
    for i in range(size):
        residual = (np.float32(_load(digits, i, _BYTE)) - middle) * width * _load(channel_row, i, _FLOAT)
        _store(decoded, i, _FLOAT, _round_to(dtype, residual + _load(predicted, i, _FLOAT)))


@_jit(inline="always")
def _pack_digits(digits, size, payload, start, levels, per_byte):
    """Pack digits into bytes from index `start` of the payload; `levels` and `per_byte` are compile-time constants."""
    for index in range(size // per_byte):
        byte = _load(digits, index * per_byte + per_byte - 1, _BYTE)
        for digit in range(per_byte - 2, -1, -1):
            byte = np.uint8(byte * np.uint8(levels) + _load(digits, index * per_byte + digit, _BYTE))
        _store(payload, start + index, _BYTE, byte)
    if size % per_byte:
        byte = np.uint8(0)
        for i in range(size - 1, size // per_byte * per_byte - 1, -1):
            byte = np.uint8(byte * np.uint8(levels) + _load(digits, i, _BYTE))
        _store(payload, start + size // per_byte, _BYTE, byte)


@_jit
def _pack_row(digits, size, payload, start, levels):
    """Pack the digits of a row, with code specialized for each grid."""
    if levels == 2:
        _pack_digits(digits, size, payload, start, 2, 8)
    elif levels == 4:
        _pack_digits(digits, size, payload, start, 4, 4)
    elif levels == 16:
        _pack_digits(digits, size, payload, start, 16, 2)
    else:
        _pack_digits(digits, size, payload, start, 256, 1)


@_jit(inline="always")
def _unpack_digits(digits, size, payload, start, levels, per_byte):
    """Unpack bytes to digits; the buffer has space for the unused digits of the last byte."""
    for index in range(-(-size // per_byte)):
        byte = _load(payload, start + index, _BYTE)
        for digit in range(per_byte):
            _store(digits, index * per_byte + digit, _BYTE, np.uint8(byte % np.uint8(levels)))
            byte = byte // np.uint8(levels)


@_jit
def _unpack_row(digits, size, payload, start, levels):
    """Unpack the digits of a row; the inverse of :func:`_pack_row`."""
    if levels == 2:
        _unpack_digits(digits, size, payload, start, 2, 8)
    elif levels == 4:
        _unpack_digits(digits, size, payload, start, 4, 4)
    elif levels == 16:
        _unpack_digits(digits, size, payload, start, 16, 2)
    else:
        for i in range(size):
            _store(digits, i, _BYTE, _load(payload, start + i, _BYTE))


@_jit
def _pack_rows(digits, size, payload, start, levels, count):
    """Pack the digits of `count` rows, one after the other in the buffer, into bytes of one column each.

    The first row has the lowest digits. The loops over columns compile to vector instructions.
    """
    last = digits + (count - 1) * size
    for i in range(size):
        _store(payload, start + i, _BYTE, _load(last, i, _BYTE))
    for row in range(count - 2, -1, -1):
        for i in range(size):
            byte = np.uint8(_load(payload, start + i, _BYTE) * np.uint8(levels))
            _store(payload, start + i, _BYTE, np.uint8(byte + _load(digits + row * size, i, _BYTE)))


@_jit(inline="always")
def _unpack_columns(digits, size, payload, start, levels, per_byte):
    """Unpack bytes to the digits of `per_byte` rows; the last row holds what is left of the bytes until then."""
    rest = digits + (per_byte - 1) * size
    for i in range(size):
        _store(rest, i, _BYTE, _load(payload, start + i, _BYTE))
    for row in range(per_byte - 1):
        for i in range(size):
            byte = _load(rest, i, _BYTE)
            left = byte // np.uint8(levels)
            _store(digits + row * size, i, _BYTE, np.uint8(byte - left * np.uint8(levels)))
            _store(rest, i, _BYTE, np.uint8(left))


@_jit
def _unpack_rows(digits, size, payload, start, levels):
    """Unpack bytes to the digits of rows; the inverse of :func:`_pack_rows`, but for rows that there are not."""
    if levels == 3:
        _unpack_columns(digits, size, payload, start, 3, 5)
    else:
        _unpack_columns(digits, size, payload, start, 6, 3)


class EncodingLayout(NamedTuple):
    """Sizes of values (P, G, H, T, D), and where their rows are in memory and in a payload."""

    groups: int
    """G."""
    heads: int
    """H."""
    tokens: int
    """T."""
    dim: int
    """D."""
    local_start: int
    """First slot of this rank, or L without local slots."""
    local_count: int
    """Number of slots of this rank, which are contiguous."""
    slot_stride: int
    """Stride of the values' slots, in values; the last dim is contiguous."""
    group_stride: int
    """Stride of the values' groups."""
    head_stride: int
    """Stride of the values' heads."""
    token_stride: int
    """Stride of the values' tokens."""
    row_tokens: int
    """Tokens per row."""
    active: int
    """Number of tokens sent per group."""
    levels: int
    """Number of quantization levels."""
    per_byte: int
    """Number of levels in a byte."""
    packed_rows: int
    """Number of rows of which a byte has a level each; 1 if its levels are those of adjacent columns."""
    width: float
    """Width of a level at scale 1."""
    payload_stride: int
    """Stride of the payload's slots, in bytes."""
    scales_offset: int
    """Byte at which the scales of a slot's payload begin."""
    gain_offset: int
    """Byte at which the gain of a slot's payload begins; 0 if it carries none."""


class BaseRows(NamedTuple):
    """Where the rows of a base (L, G, H, T, D) are in memory."""

    address: int
    """Address of the first value; 0 without a base."""
    weight: float
    """Weight of the base in the difference."""
    link_stride: int
    """Stride of the links, in values; the last dim is contiguous."""
    group_stride: int
    """Stride of the groups."""
    head_stride: int
    """Stride of the heads."""
    token_stride: int
    """Stride of the tokens."""


NO_BASE = BaseRows(0, 0.0, 0, 0, 0, 0)
"""Nothing is subtracted or added."""


@_jit
def _locate_base(base, link, group, head):
    """Return the index of the first value of a head in a base."""
    return link * base.link_stride + group * base.group_stride + head * base.head_stride


@_jit
def _subtract_base(row, base, start, size, dtype):
    """Subtract values of a base from the values of a token in a float32 buffer, rounding to `dtype`."""
    weight = np.float32(base.weight)
    _prefetch_row(base.address, start + _PREFETCH_ROWS * base.token_stride, size, dtype)
    for i in range(size):
        difference = _load(row, i, _FLOAT) - weight * _load(base.address, start + i, dtype)
        _store(row, i, _FLOAT, _round_to(dtype, difference))


@_jit
def _store_with_base(target, at, decoded, base, start, size, dtype):
    """Write decoded differences of a token, in a float32 buffer, plus the values of a base to the target."""
    weight = np.float32(base.weight)
    _prefetch_row(base.address, start + _PREFETCH_ROWS * base.token_stride, size, dtype)
    for i in range(size):
        value = weight * _load(base.address, start + i, dtype) + _load(decoded, i, _FLOAT)
        _store(target, at + i, dtype, value)


@_jit
def _locate_head(layout, index):
    """Return the link, group and head of a flat head index, the index of its first value and its payload's offset."""
    pair, head = index // layout.heads, index % layout.heads
    link, group = pair // layout.groups, pair % layout.groups
    slot = link + (layout.local_count if link >= layout.local_start else 0)
    start = slot * layout.slot_stride + group * layout.group_stride + head * layout.head_stride
    return link, group, head, start, slot * layout.payload_stride


@_jit
def encode(
    first, last, layout, dtype, reference_norm, by_maximum, sample_stride,
    values, base, reference, previous, gains, channels, positions, scale_table, payload, new_reference, sums,
):  # fmt: skip
    """Encode the values of heads `first` to `last`, counted over links and groups, and write the new reference.

    Args:
        first: first head; no byte has rows of this head and of earlier ones.
        last: end of the heads.
        layout: sizes, strides and offsets, an EncodingLayout.
        dtype: type of the values and references in memory.
        reference_norm: see :func:`_scale_code`.
        by_maximum: whether scales follow the row's maximum.
        sample_stride: stride over the tokens of which gains are estimated.
        values: (P, G, H, T, D).
        base: where the base is that is subtracted from the values, a BaseRows.
        reference: link reference (L, G, H, T, D), contiguous.
        previous: link reference of the step before, of the same shape, or 0.
        gains: uint8 (L), or 0.
        channels: scales of channels, float32 (L, H, D), or 0 for ones.
        positions: positions of active tokens, int32 (L, G, T), or 0 to send all.
        scale_table: scale of each code, float32 (256).
        payload: uint8 (P, n), written.
        new_reference: (L, G, H, T, D), written.
        sums: float64 (L, G, H, 4), written: error energy, value energy, numerator and denominator of the gain.
    """
    dim, tokens, row_tokens = layout.dim, layout.tokens, layout.row_tokens
    size = row_tokens * dim
    row_bytes, level_width = -(-size // layout.per_byte), np.float32(layout.width)
    packed_rows, rows = layout.packed_rows, layout.groups * layout.heads * (layout.active // row_tokens)
    values_row, predicted = _stack_buffer(size * _FLOAT_BYTES), _stack_buffer(size * _FLOAT_BYTES)
    change, residual = _stack_buffer(size * _FLOAT_BYTES), _stack_buffer(size * _FLOAT_BYTES)
    decoded, digits = _stack_buffer(size * _FLOAT_BYTES), _stack_buffer(packed_rows * size)
    channel_row = _stack_buffer(size * _FLOAT_BYTES)
    for index in range(first, last):
        link, group, head, start, message = _locate_head(layout, index)
        if channels:
            _fill_channel_row(channel_row, channels, (link * layout.heads + head) * dim, row_tokens, dim)
        base_start = _locate_base(base, link, group, head)
        gain = np.float32(_load(gains, link, _BYTE)) / _GAIN_STEPS if previous else _ZERO
        if layout.gain_offset and group == 0 and head == 0:
            for i in range(GAIN_BYTES):
                _store(payload, message + layout.gain_offset + i, _BYTE, _load(gains, link, _BYTE))
        error_energy, value_energy, numerator, denominator = 0.0, 0.0, 0.0, 0.0
        for row in range(tokens // row_tokens):
            position = _load(positions, index // layout.heads * tokens + row, _INT) - 1 if positions else row
            offset = (index * tokens + row * row_tokens) * dim
            for i in range(row_tokens):
                at = start + (row * row_tokens + i) * layout.token_stride
                _prefetch_row(values, at + _PREFETCH_ROWS * row_tokens * layout.token_stride, dim, dtype)
                value_energy += _load_row(values_row + i * dim * _FLOAT_BYTES, values, at, dim, dtype)
                if base.address:
                    base_at = base_start + (row * row_tokens + i) * base.token_stride
                    _subtract_base(values_row + i * dim * _FLOAT_BYTES, base, base_at, dim, dtype)
            _predict_row(predicted, change, reference, previous, offset, size, gain, dtype)
            if position >= 0:
                energy = _subtract_row(residual, values_row, predicted, size, dtype)
                if channels:
                    energy = _divide_row(residual, channel_row, size)
                code = _scale_code(residual, energy, size, by_maximum, reference_norm)
                width = level_width * _load(scale_table, code, _FLOAT)
                sent_row = (group * layout.heads + head) * (layout.active // row_tokens) + position
                number = sent_row % packed_rows
                at = digits + number * size
                _quantize_row(at, decoded, predicted, residual, size, layout.levels, width, dtype)
                if channels:
                    _dequantize_channels(decoded, at, predicted, channel_row, size, layout.levels, width, dtype)
                if packed_rows == 1:
                    _pack_row(digits, size, payload, message + sent_row * row_bytes, layout.levels)
                elif number == packed_rows - 1 or sent_row == rows - 1:
                    at = message + sent_row // packed_rows * size
                    _pack_rows(digits, size, payload, at, layout.levels, number + 1)
                _store(payload, message + layout.scales_offset + sent_row, _BYTE, np.uint8(code))
            received = decoded if position >= 0 else predicted
            error_energy += _store_reference_row(new_reference, offset, values_row, received, size, dtype)
            for i in range(row_tokens if previous else 0):
                token = row * row_tokens + i
                if token % sample_stride == 0:
                    at, delta = start + token * layout.token_stride, change + i * dim * _FLOAT_BYTES
                    if base.address:
                        more = _gain_sums(values_row, i * dim, _FLOAT, reference, offset + i * dim, delta, dim, dtype)
                    else:
                        more = _gain_sums(values, at, dtype, reference, offset + i * dim, delta, dim, dtype)
                    numerator, denominator = numerator + more[0], denominator + more[1]
        _store(sums, 4 * index, 0.0, error_energy)
        _store(sums, 4 * index + 1, 0.0, value_energy)
        _store(sums, 4 * index + 2, 0.0, numerator)
        _store(sums, 4 * index + 3, 0.0, denominator)


@_jit
def reduce_sums(sums, links, heads, energies, gains):
    """Reduce the sums of :func:`encode` to energies and gains.

    Args:
        sums: float64 (links, heads, 4).
        links: number of links.
        heads: number of heads per link, over all groups.
        energies: float32 (2), written: error energy and value energy.
        gains: uint8 (links), written with the gain of each link; or 0.
    """
    error_energy, value_energy = 0.0, 0.0
    for link in range(links):
        numerator, denominator = 0.0, 0.0
        for head in range(link * heads, (link + 1) * heads):
            error_energy += _load(sums, 4 * head, 0.0)
            value_energy += _load(sums, 4 * head + 1, 0.0)
            numerator += _load(sums, 4 * head + 2, 0.0)
            denominator += _load(sums, 4 * head + 3, 0.0)
        if gains:
            gain = np.rint(numerator / denominator * GAIN_STEPS)
            gain = min(max(gain, 0.0), float(GAIN_STEPS)) if gain == gain else 0.0
            _store(gains, link, _BYTE, np.uint8(gain))
    _store(energies, 0, _FLOAT, np.float32(error_energy))
    _store(energies, 1, _FLOAT, np.float32(value_energy))


@_jit
def decode(
    first, last, layout, dtype,
    payload, base, reference, previous, gains, channels, positions, scale_table, new_reference, target,
):  # fmt: skip
    """Decode the payload of heads `first` to `last`, counted over links and groups.

    Args:
        first: first head; no byte has rows of this head and of earlier ones.
        last: end of the heads.
        layout: sizes, strides and offsets, an EncodingLayout.
        dtype: type of the values and references in memory.
        payload: uint8 (P, n).
        base: where the base is that is added to the decoded values, a BaseRows.
        reference: link reference (L, G, H, T, D), contiguous.
        previous: link reference of the step before, of the same shape, or 0.
        gains: uint8 (L); 0 if the payload carries the gain.
        channels: scales of channels, float32 (L, H, D), or 0 for ones.
        positions: positions of active tokens, int32 (L, G, T), or 0 if all are sent.
        scale_table: scale of each code, float32 (256).
        new_reference: (L, G, H, T, D), written.
        target: (P, G, H, T, D), written except for the local slots.
    """
    dim, tokens, row_tokens = layout.dim, layout.tokens, layout.row_tokens
    size = row_tokens * dim
    row_bytes, level_width = -(-size // layout.per_byte), np.float32(layout.width)
    packed_rows = layout.packed_rows
    predicted, change = _stack_buffer(size * _FLOAT_BYTES), _stack_buffer(size * _FLOAT_BYTES)
    decoded, digits = (
        _stack_buffer(size * _FLOAT_BYTES),
        _stack_buffer(max(packed_rows * size, row_bytes * layout.per_byte)),
    )
    channel_row = _stack_buffer(size * _FLOAT_BYTES)
    for index in range(first, last):
        link, group, head, start, message = _locate_head(layout, index)
        if channels:
            _fill_channel_row(channel_row, channels, (link * layout.heads + head) * dim, row_tokens, dim)
        gain, base_start = _ZERO, _locate_base(base, link, group, head)
        if previous:
            is_sent, start_of_gain = layout.gain_offset > 0, message + layout.gain_offset
            sent = _load(payload, start_of_gain, _BYTE) if is_sent else _load(gains, link, _BYTE)
            gain = np.float32(sent) / _GAIN_STEPS
        for row in range(tokens // row_tokens):
            position = _load(positions, index // layout.heads * tokens + row, _INT) - 1 if positions else row
            offset = (index * tokens + row * row_tokens) * dim
            _predict_row(predicted, change, reference, previous, offset, size, gain, dtype)
            if position >= 0:
                sent_row = (group * layout.heads + head) * (layout.active // row_tokens) + position
                code = int(_load(payload, message + layout.scales_offset + sent_row, _BYTE))
                width = level_width * _load(scale_table, code, _FLOAT)
                number = sent_row % packed_rows
                if packed_rows == 1:
                    _unpack_row(digits, size, payload, message + sent_row * row_bytes, layout.levels)
                elif number == 0:
                    _unpack_rows(digits, size, payload, message + sent_row // packed_rows * size, layout.levels)
                at = digits + number * size
                if channels:
                    _dequantize_channels(decoded, at, predicted, channel_row, size, layout.levels, width, dtype)
                else:
                    _dequantize_row(decoded, at, predicted, size, layout.levels, width, dtype)
            received = decoded if position >= 0 else predicted
            for i in range(size):
                _store_rounded(new_reference, offset + i, dtype, _load(received, i, _FLOAT))
            for i in range(row_tokens):
                at = start + (row * row_tokens + i) * layout.token_stride
                _prefetch_row(target, at + _PREFETCH_ROWS * row_tokens * layout.token_stride, dim, dtype)
                if base.address:
                    base_at = base_start + (row * row_tokens + i) * base.token_stride
                    _store_with_base(target, at, received + i * dim * _FLOAT_BYTES, base, base_at, dim, dtype)
                else:
                    for j in range(dim):
                        _store_rounded(target, at + j, dtype, _load(received, i * dim + j, _FLOAT))


@_jit
def score(first, last, layout, dtype, values, base, reference, previous, gains, scores):
    """Compute the scores of the tokens of groups `first` to `last`, counted over links.

    Args:
        first: first group.
        last: end of the groups.
        layout: sizes and strides, an EncodingLayout.
        dtype: type of the values and references in memory.
        values: (P, G, H, T, D).
        base: where the base is that is subtracted from the values, a BaseRows.
        reference: link reference (L, G, H, T, D), contiguous.
        previous: link reference of the step before, of the same shape, or 0.
        gains: uint8 (L), or 0.
        scores: float32 (L, G, T), written: squared distance to the prediction, summed over heads and dims.
    """
    dim, tokens = layout.dim, layout.tokens
    values_row, predicted = _stack_buffer(dim * _FLOAT_BYTES), _stack_buffer(dim * _FLOAT_BYTES)
    change, residual = _stack_buffer(dim * _FLOAT_BYTES), _stack_buffer(dim * _FLOAT_BYTES)
    for pair in range(first, last):
        for head in range(layout.heads):
            index = pair * layout.heads + head
            link, group, _, start, _ = _locate_head(layout, index)
            base_start = _locate_base(base, link, group, head)
            gain = np.float32(_load(gains, link, _BYTE)) / _GAIN_STEPS if previous else _ZERO
            for token in range(tokens):
                at, offset = start + token * layout.token_stride, (index * tokens + token) * dim
                _prefetch_row(values, at + _PREFETCH_ROWS * layout.token_stride, dim, dtype)
                _predict_row(predicted, change, reference, previous, offset, dim, gain, dtype)
                _load_row(values_row, values, at, dim, dtype)
                if base.address:
                    _subtract_base(values_row, base, base_start + token * base.token_stride, dim, dtype)
                earlier_heads = _load(scores, pair * tokens + token, _FLOAT) if head else _ZERO
                energy = _subtract_row(residual, values_row, predicted, dim, dtype)
                _store(scores, pair * tokens + token, _FLOAT, earlier_heads + energy)
