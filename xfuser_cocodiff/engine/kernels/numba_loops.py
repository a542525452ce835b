"""Loops over rows of values, compiled by Numba for CPUs, see :mod:`compiled`.

Their functions are given addresses, strides in values, and numbers: to be given arrays takes them as long as small
messages do. They are compiled at the first use on a machine, and kept. Values of a row are worked on in float32, one
loop after the other while they are at hand, of which each becomes vector instructions.

A `kind` is a value of the type in which values lie in memory: of a float32, or of 16 bits for bfloat16.
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
from xfuser_cocodiff.engine.kernels.rows import SHARES, TOLD

# Code that is kept does not see that constants of other files have changed: then this file has to change too.
_PER_OCTAVE, _ORIGIN = np.float32(quantize.PER_OCTAVE), np.float32(quantize.ORIGIN)
_NOT_FINITE, _MOST_CODE = quantize.NOT_FINITE, np.float32(quantize.NOT_FINITE - 1)
_ZERO, _HALF, _INFINITE = np.float32(0), np.float32(0.5), np.float32(np.inf)
_SHARES = np.float32(SHARES)


# Sums and products stay as they are written: both ends of a link must come to the same bits.
def _compiled(function: Callable | None = None, **options: Any) -> Callable:
    if function is None:
        return functools.partial(_compiled, **options)
    options |= {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to keep it in can be written
        return numba.njit(**options)(function)


# For sums that one end alone makes.
_compiled_in_any_order = functools.partial(_compiled, fastmath={"reassoc"})


def _widened(builder, value):
    bits = builder.shl(builder.zext(value, _BITS), _BITS(16))
    return builder.bitcast(bits, _REAL)


def _narrowed(builder, value):
    """To bfloat16, to the nearest, and to an even one between two. What is no number stays none: made from bfloat16, or
    by the processor, it has no bits below, of which more would overflow."""
    bits = builder.bitcast(value, _BITS)
    is_odd = builder.and_(builder.lshr(bits, _BITS(16)), _BITS(1))
    rounded = builder.lshr(builder.add(builder.add(bits, _BITS(0x7FFF)), is_odd), _BITS(16))
    return builder.trunc(rounded, ir.IntType(16))


_BITS, _REAL = ir.IntType(32), ir.FloatType()


def _place(context, builder, kind, address, index, inbounds=True):
    pointer = builder.inttoptr(address, context.get_value_type(kind).as_pointer())
    return builder.gep(pointer, [index], inbounds=inbounds)


@intrinsic
def _peek(context, address, index, kind):
    """A value in memory, as float32 where it is bfloat16."""
    is_half = kind == types.uint16

    def generate(context, builder, signature, args):
        value = builder.load(_place(context, builder, kind, *args[:2]))
        return _widened(builder, value) if is_half else value

    return (types.float32 if is_half else kind)(types.intp, types.intp, kind), generate


@intrinsic
def _poke(context, address, index, kind, value):
    """The inverse."""

    def generate(context, builder, signature, args):
        value = _narrowed(builder, args[3]) if kind == types.uint16 else args[3]
        builder.store(value, _place(context, builder, kind, *args[:2]))

    return types.void(types.intp, types.intp, kind, types.float32 if kind == types.uint16 else kind), generate


@intrinsic
def _keep(context, address, index, kind, value):
    """The same of a value that is as tensors of the kind hold it: see :func:`_as`."""

    def generate(context, builder, signature, args):
        value = args[3]
        if kind == types.uint16:
            value = builder.trunc(builder.lshr(builder.bitcast(value, _BITS), _BITS(16)), ir.IntType(16))
        builder.store(value, _place(context, builder, kind, *args[:2]))

    return types.void(types.intp, types.intp, kind, types.float32 if kind == types.uint16 else kind), generate


@intrinsic
def _as(context, kind, value):
    """A value as tensors of a kind would hold it."""

    def generate(context, builder, signature, args):
        return _widened(builder, _narrowed(builder, args[1])) if kind == types.uint16 else args[1]

    return types.float32(kind, types.float32), generate


@intrinsic
def _fetch(context, address, index, kind):
    """Asks for the line of memory of a value; there may be no such value."""

    def generate(context, builder, signature, args):
        flag, pointer = ir.IntType(32), _place(context, builder, kind, args[0], args[1], inbounds=False)
        form = ir.FunctionType(ir.VoidType(), [pointer.type, flag, flag, flag])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], form)
        builder.call(prefetch, [pointer, flag(0), flag(3), flag(1)])  # to read, to be kept, data
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, kind), generate


_BYTE, _INT, _FLOAT = np.uint8(0), np.int32(0), np.float32(0)
_REAL_BYTES = 4
_AHEAD = 4
"""Rows that are asked for before they are read. Processors foresee what follows in memory, but not where heads lie
side by side, what the next row is: without that, decoding takes twice the time, and scores three times."""
_OF_A_LINE = 16
"""Values that a line of memory has at least."""


@intrinsic
def _room(context, size):
    """The address of so many bytes of the caller's stack, which it is not to ask for in a loop. Arrays are slower: an
    index that may be negative makes scatters of stores, and each call counts who holds them."""

    def generate(context, builder, signature, args):
        room = builder.alloca(ir.IntType(8), args[0])
        room.align = 64  # what a vector has at most
        return builder.ptrtoint(room, context.get_value_type(types.intp))

    return types.intp(size), generate


@_compiled
def _near(address, at, size, kind):
    """Have a row at hand soon."""
    for i in range(0, size, _OF_A_LINE):
        _fetch(address, at + i, kind)


@_compiled
def _hope(hoped, change, held, before, own, size, share, kind):
    """What is expected of a row, and what it has changed by last."""
    _near(held, own + _AHEAD * size, size, kind)
    if before:
        _near(before, own + _AHEAD * size, size, kind)
        for i in range(size):
            now = _peek(held, own + i, kind)
            past = _as(kind, now - _peek(before, own + i, kind))
            _poke(change, i, _FLOAT, past)
            _poke(hoped, i, _FLOAT, _as(kind, _as(kind, past * share) + now))
    else:
        for i in range(size):
            _poke(hoped, i, _FLOAT, _peek(held, own + i, kind))


@_compiled_in_any_order
def _load(value, values, at, size, kind):
    """Values of a token; returns the sum of their squares."""
    total = _ZERO
    for i in range(size):
        one = _peek(values, at + i, kind)
        _poke(value, i, _FLOAT, one)
        total += one * one
    return total


@_compiled_in_any_order
def _part(away, value, hoped, size, kind):
    """What values of a row are away from others; returns the sum of its squares."""
    total = _ZERO
    for i in range(size):
        one = _as(kind, _peek(value, i, _FLOAT) - _peek(hoped, i, _FLOAT))
        _poke(away, i, _FLOAT, one)
        total += one * one
    return total


@_compiled_in_any_order
def _keep_row(now, own, value, made, size, kind):
    """What the other end has of a row, into the reference; returns the sum of the squares of what that lacks."""
    total = _ZERO
    for i in range(size):
        has = _peek(made, i, _FLOAT)
        _keep(now, own + i, kind, has)
        lacking = _as(kind, _peek(value, i, _FLOAT) - has)
        total += lacking * lacking
    return total


@_compiled_in_any_order
def _came_again(values, at, held, own, change, size, kind):
    """Sums of what a token has changed by, times what it had changed by before; and of the squares of that."""
    found, whole = _ZERO, _ZERO
    for i in range(size):
        past = _peek(change, i, _FLOAT)
        found += (_peek(values, at + i, kind) - _peek(held, own + i, kind)) * past
        whole += past * past
    return found, whole


@_compiled
def _largest(values, size):
    found = _ZERO
    for i in range(size):
        value = abs(_peek(values, i, _FLOAT))
        found = value if value > found else found
    return found


@_compiled
def _scale(away, square, size, by_maximum, root):
    """The code of a row's scale, of which the sum of the squares is known."""
    if by_maximum:
        largest = _largest(away, size)
        if not largest < _INFINITE or square != square:
            return _NOT_FINITE
        code = np.ceil(np.log2(largest / root) * _PER_OCTAVE) + _ORIGIN
    else:
        if not square < _INFINITE:
            return _NOT_FINITE
        code = np.rint(np.log2(np.sqrt(square) * root) * _PER_OCTAVE) + _ORIGIN
    return int(min(max(code, _ZERO), _MOST_CODE))


@_compiled
def _quantize(digits, made, hoped, away, size, count, width, kind):
    """Levels of a row, and what both ends make of them."""
    half, last, shift = np.float32(count // 2), np.float32(count - 1), _HALF if count % 2 else _ZERO
    middle = np.float32((count - 1) / 2)
    for i in range(size):
        level = np.floor(_peek(away, i, _FLOAT) / width + shift)
        level = (level if level == level else _ZERO) + half
        level = level if level > _ZERO else _ZERO
        level = level if level < last else last
        _poke(digits, i, _BYTE, np.uint8(level))
        _poke(made, i, _FLOAT, _as(kind, (level - middle) * width + _peek(hoped, i, _FLOAT)))


@_compiled
def _restore(made, digits, hoped, size, count, width, kind):
    """The same of levels that have come. Not in place, which would be one value after the other."""
    middle = np.float32((count - 1) / 2)
    for i in range(size):
        level = np.float32(_peek(digits, i, _BYTE))
        _poke(made, i, _FLOAT, _as(kind, (level - middle) * width + _peek(hoped, i, _FLOAT)))


@_compiled(inline="always")
def _pack(digits, size, payload, start, count, per):
    for place in range(size // per):
        byte = _peek(digits, place * per + per - 1, _BYTE)
        for digit in range(per - 2, -1, -1):
            byte = np.uint8(byte * np.uint8(count) + _peek(digits, place * per + digit, _BYTE))
        _poke(payload, start + place, _BYTE, byte)
    if size % per:
        byte = np.uint8(0)
        for i in range(size - 1, size // per * per - 1, -1):
            byte = np.uint8(byte * np.uint8(count) + _peek(digits, i, _BYTE))
        _poke(payload, start + size // per, _BYTE, byte)


@_compiled
def _packed(digits, size, payload, start, count):
    """Each grid for itself, so that what is constant for it becomes so."""
    if count == 2:
        _pack(digits, size, payload, start, 2, 8)
    elif count == 3:
        _pack(digits, size, payload, start, 3, 5)
    elif count == 4:
        _pack(digits, size, payload, start, 4, 4)
    elif count == 6:
        _pack(digits, size, payload, start, 6, 3)
    elif count == 16:
        _pack(digits, size, payload, start, 16, 2)
    else:
        _pack(digits, size, payload, start, 256, 1)


@_compiled(inline="always")
def _unpack(digits, size, payload, start, count, per):
    for place in range(-(-size // per)):  # there is room for the digits of the last byte that stand for nothing
        byte = _peek(payload, start + place, _BYTE)
        for digit in range(per):
            _poke(digits, place * per + digit, _BYTE, np.uint8(byte % np.uint8(count)))
            byte = byte // np.uint8(count)


@_compiled
def _unpacked(digits, size, payload, start, count):
    """The inverse of the above."""
    if count == 2:
        _unpack(digits, size, payload, start, 2, 8)
    elif count == 3:
        _unpack(digits, size, payload, start, 3, 5)
    elif count == 4:
        _unpack(digits, size, payload, start, 4, 4)
    elif count == 6:
        _unpack(digits, size, payload, start, 6, 3)
    elif count == 16:
        _unpack(digits, size, payload, start, 16, 2)
    else:
        for i in range(size):
            _poke(digits, i, _BYTE, _peek(payload, start + i, _BYTE))


class Form(NamedTuple):
    """Sizes of values (L, G, H, T, D) that are encoded, and where they are in memory and in a payload."""

    groups: int
    heads: int
    tokens: int
    dim: int
    here: int
    """The first place that is the rank's own, or L where there is none."""
    here_count: int
    """Of such places, which follow each other."""
    by_place: int
    by_group: int
    by_head: int
    by_token: int
    """Strides of the values, of which dims follow each other."""
    together: int
    """Tokens of a row."""
    active: int
    """Tokens that are sent of each group."""
    levels: int
    per_byte: int
    width: float
    """Of a level, where the scale is 1."""
    by_payload: int
    """Bytes between payloads."""
    scales_at: int
    told_at: int
    """Where the share is told; 0 where it is not."""


@_compiled
def _head(form, each):
    """Of a head, counted over links and groups: its link, its group and its number there, and where its values and its
    payload begin."""
    pair, head = each // form.heads, each % form.heads
    link, group = pair // form.groups, pair % form.groups
    place = link + (form.here_count if link >= form.here else 0)
    start = place * form.by_place + group * form.by_group + head * form.by_head
    return link, group, head, start, place * form.by_payload


@_compiled
def encode(
    first, last, form, kind, root, by_maximum, sample, values, held, before, shares, numbers, table, payload, now, sums
):
    """Values of some heads to levels and scales, and the reference to what the other end makes of them. Writes four
    sums of each head: of squares that are lacking and wanted, and for the share of the last change that has come
    again."""
    dim, tokens, together = form.dim, form.tokens, form.together
    size = together * dim
    taken, width_of = -(-size // form.per_byte), np.float32(form.width)
    real = size * _REAL_BYTES
    value, hoped, change, away, made = _room(real), _room(real), _room(real), _room(real), _room(real)
    digits = _room(size)
    for each in range(first, last):
        link, group, head, start, far = _head(form, each)
        share = np.float32(_peek(shares, link, _BYTE)) / _SHARES if before else _ZERO
        if form.told_at and group == 0 and head == 0:
            for i in range(TOLD):
                _poke(payload, far + form.told_at + i, _BYTE, _peek(shares, link, _BYTE))
        lacking, wanted, found, whole = 0.0, 0.0, 0.0, 0.0
        for row in range(tokens // together):
            slot = _peek(numbers, each // form.heads * tokens + row, _INT) - 1 if numbers else row
            own = (each * tokens + row * together) * dim
            for i in range(together):
                at = start + (row * together + i) * form.by_token
                _near(values, at + _AHEAD * together * form.by_token, dim, kind)
                wanted += _load(value + i * dim * _REAL_BYTES, values, at, dim, kind)
            _hope(hoped, change, held, before, own, size, share, kind)
            if slot >= 0:
                square = _part(away, value, hoped, size, kind)
                code = _scale(away, square, size, by_maximum, root)
                width = width_of * _peek(table, code, _FLOAT)
                _quantize(digits, made, hoped, away, size, form.levels, width, kind)
                line = (group * form.heads + head) * (form.active // together) + slot
                _packed(digits, size, payload, far + line * taken, form.levels)
                _poke(payload, far + form.scales_at + line, _BYTE, np.uint8(code))
            lacking += _keep_row(now, own, value, made if slot >= 0 else hoped, size, kind)
            for i in range(together if before else 0):
                token = row * together + i
                if token % sample == 0:
                    at, past = start + token * form.by_token, change + i * dim * _REAL_BYTES
                    more = _came_again(values, at, held, own + i * dim, past, dim, kind)
                    found, whole = found + more[0], whole + more[1]
        _poke(sums, 4 * each, 0.0, lacking)
        _poke(sums, 4 * each + 1, 0.0, wanted)
        _poke(sums, 4 * each + 2, 0.0, found)
        _poke(sums, 4 * each + 3, 0.0, whole)


@_compiled
def total(sums, links, heads, totals, again):
    """What heads have found, to what is lacking and wanted in all, and to the shares that come again."""
    lacking, wanted = 0.0, 0.0
    for link in range(links):
        found, whole = 0.0, 0.0
        for head in range(link * heads, (link + 1) * heads):
            lacking += _peek(sums, 4 * head, 0.0)
            wanted += _peek(sums, 4 * head + 1, 0.0)
            found += _peek(sums, 4 * head + 2, 0.0)
            whole += _peek(sums, 4 * head + 3, 0.0)
        if again:
            share = np.rint(found / whole * SHARES)
            share = min(max(share, 0.0), float(SHARES)) if share == share else 0.0
            _poke(again, link, _BYTE, np.uint8(share))
    _poke(totals, 0, _FLOAT, np.float32(lacking))
    _poke(totals, 1, _FLOAT, np.float32(wanted))


@_compiled
def decode(first, last, form, kind, payload, held, before, shares, numbers, table, now, target):
    """Levels and scales of some heads to values, in the reference and where attention reads them."""
    dim, tokens, together = form.dim, form.tokens, form.together
    size = together * dim
    taken, width_of = -(-size // form.per_byte), np.float32(form.width)
    real = size * _REAL_BYTES
    hoped, change, made, digits = _room(real), _room(real), _room(real), _room(taken * form.per_byte)
    for each in range(first, last):
        link, group, head, start, far = _head(form, each)
        told = _peek(payload, far + form.told_at, _BYTE) if form.told_at else _ZERO
        share = np.float32(told if form.told_at else _peek(shares, link, _BYTE)) / _SHARES if before else _ZERO
        for row in range(tokens // together):
            slot = _peek(numbers, each // form.heads * tokens + row, _INT) - 1 if numbers else row
            own = (each * tokens + row * together) * dim
            _hope(hoped, change, held, before, own, size, share, kind)
            if slot >= 0:
                line = (group * form.heads + head) * (form.active // together) + slot
                width = width_of * _peek(table, int(_peek(payload, far + form.scales_at + line, _BYTE)), _FLOAT)
                _unpacked(digits, size, payload, far + line * taken, form.levels)
                _restore(made, digits, hoped, size, form.levels, width, kind)
            come = made if slot >= 0 else hoped
            for i in range(size):
                _keep(now, own + i, kind, _peek(come, i, _FLOAT))
            for i in range(together):
                at = start + (row * together + i) * form.by_token
                _near(target, at + _AHEAD * together * form.by_token, dim, kind)
                for j in range(dim):
                    _keep(target, at + j, kind, _peek(come, i * dim + j, _FLOAT))


@_compiled
def score(first, last, form, kind, values, held, before, shares, found):
    """Tokens of some groups, counted over links, over all heads."""
    dim, tokens = form.dim, form.tokens
    real = dim * _REAL_BYTES
    value, hoped, change, away = _room(real), _room(real), _room(real), _room(real)
    for pair in range(first, last):
        for head in range(form.heads):
            each = pair * form.heads + head
            link, _, _, start, _ = _head(form, each)
            share = np.float32(_peek(shares, link, _BYTE)) / _SHARES if before else _ZERO
            for token in range(tokens):
                at = start + token * form.by_token
                _near(values, at + _AHEAD * form.by_token, dim, kind)
                _hope(hoped, change, held, before, (each * tokens + token) * dim, dim, share, kind)
                _load(value, values, at, dim, kind)
                total = _peek(found, pair * tokens + token, _FLOAT) if head else _ZERO
                _poke(found, pair * tokens + token, _FLOAT, total + _part(away, value, hoped, dim, kind))
