"""The kernels in Triton: each reads and writes every tensor once. See the package for what they do.

A program takes rows of values: of some tokens of one head, one token a row, or several where heads are small. Where
three or five values share a byte, columns have gaps: bytes and the values of one are dims of powers of two. Products
and sums are not fused into one rounding: encoder and decoder must come to the same bits.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from xfuser_cocodiff.engine.kernels import quantize, rows
from xfuser_cocodiff.engine.kernels.rows import ActiveTokens, Encoded, Prediction, away, put_away, sampled, typed

_PER_OCTAVE, _ORIGIN = tl.constexpr(float(quantize.PER_OCTAVE)), tl.constexpr(float(quantize.ORIGIN))
_NOT_FINITE = tl.constexpr(float(quantize.NOT_FINITE))
_SHARES = tl.constexpr(float(rows.SHARES))
_LEAST = tl.constexpr(torch.finfo(torch.float32).tiny)
"""In the place of no width."""
_VALUES = 4096
"""Of a program."""


@triton.jit
def _place(groups, heads, rows, block_rows: tl.constexpr):
    """The head that a program works on, by its number among all and by link, group and number, and the program's rows
    of it. One head, so that divisions are made once for a program and not for each row. Programs lie on one axis of the
    grid: CUDA has room for 65,535 of them on any other."""
    blocks = tl.cdiv(rows, block_rows)
    of_head = tl.program_id(0) // blocks
    pair = of_head // heads
    row = tl.program_id(0) % blocks * block_rows + tl.arange(0, block_rows)
    return of_head, pair // groups, pair % groups, of_head % heads, row


@triton.jit
def _columns(size, per: tl.constexpr, room: tl.constexpr, block: tl.constexpr):
    """Which value of a row each column has, which byte of it and which digit of that, and whether it has any."""
    place = tl.arange(0, block)
    byte, digit = place // room, place % room
    if per == room:  # without gaps, which the compiler would not see in a comparison of digits
        return place, byte, digit, place < size
    column = byte * per + digit
    return column, byte, digit, (digit < per) & (column < size)


@triton.jit
def _tokens(row, column, dim: tl.constexpr, together: tl.constexpr):
    """The token of each value of rows, and which of its values that is."""
    if together == 1:
        token, inner = row[:, None], column
    else:
        token, inner = row[:, None] * together + (column // dim)[None, :], column % dim
    return token, inner


@triton.jit
def _weight(digit, levels: tl.constexpr, per: tl.constexpr):
    """Of the digits of a byte."""
    weight = tl.full(digit.shape, 1, tl.int32)
    for place in tl.static_range(1, per):
        weight = tl.where(digit >= place, weight * levels, weight)
    return weight


@triton.jit
def _at(place, group, head, token, stride_place, stride_group, stride_head, stride_token):
    """Where the values of a row begin in a tensor of any strides."""
    far = place.to(tl.int64) * stride_place + group.to(tl.int64) * stride_group
    return far + head.to(tl.int64) * stride_head + token.to(tl.int64) * stride_token


@triton.jit
def _expected(held, before, offsets, inside, share, predicts: tl.constexpr):
    """What both ends expect of values, what is held of them, and the last change of that, rounded as tensors of their
    type are."""
    now = tl.load(held + offsets, mask=inside, other=0.0)
    hoped, change = now, now
    if predicts:
        change = (now.to(tl.float32) - tl.load(before + offsets, mask=inside, other=0.0).to(tl.float32)).to(now.dtype)
        part = (share.to(tl.float32) / _SHARES).to(now.dtype)
        more = (part.to(tl.float32) * change.to(tl.float32)).to(now.dtype)
        hoped = (more.to(tl.float32) + now.to(tl.float32)).to(now.dtype)
    return hoped, now, change


@triton.jit
def _restored(level, width, base, middle: tl.constexpr):
    """What both ends make of levels."""
    return ((level.to(tl.float32) - middle) * width + base.to(tl.float32)).to(base.dtype)


@triton.jit
def _scores_kernel(
    values, held, before, shares, found,
    groups, heads, tokens, here, here_count, stride_place, stride_group, stride_head, stride_token,
    dim: tl.constexpr, block_dim: tl.constexpr, block_tokens: tl.constexpr, predicts: tl.constexpr,
):  # fmt: skip
    """One program for some tokens of one group of one link, over all heads."""
    blocks, column = tl.cdiv(tokens, block_tokens), tl.arange(0, block_dim)
    pair = tl.program_id(0) // blocks
    token = tl.program_id(0) % blocks * block_tokens + tl.arange(0, block_tokens)
    link, group = pair // groups, pair % groups
    place = link + (link >= here) * here_count
    inside = (token < tokens)[:, None] & (column < dim)[None, :]
    share = tl.load(shares + link) if predicts else 0
    total = tl.zeros([block_tokens], tl.float32)
    for head in range(heads):
        own = ((pair.to(tl.int64) * heads + head) * tokens + token)[:, None] * dim + column[None, :]
        start = _at(place, group, head + 0 * token, token, stride_place, stride_group, stride_head, stride_token)
        value = tl.load(values + start[:, None] + column[None, :], mask=inside, other=0.0)
        hoped, _, _ = _expected(held, before, own, inside, share, predicts)
        away = (value.to(tl.float32) - hoped.to(tl.float32)).to(value.dtype).to(tl.float32)
        total += tl.sum(tl.where(inside, away * away, 0.0), 1)
    tl.store(found + pair.to(tl.int64) * tokens + token, total, mask=token < tokens)


@triton.jit
def _finite(values):
    """Zeros in the place of what is not finite, which is no reference for later values."""
    return tl.where(tl.abs(values.to(tl.float32)) < float("inf"), values, 0.0).to(values.dtype)


@triton.jit
def _encode_kernel(
    values, held, before, shares, numbers, table, payload, now, sums,
    groups, heads, tokens, active, here, here_count,
    stride_place, stride_group, stride_head, stride_token, stride_payload, scales_at, told_at, root, sample,
    dim: tl.constexpr, together: tl.constexpr, levels: tl.constexpr, per: tl.constexpr, width_of: tl.constexpr,
    by_maximum: tl.constexpr, room: tl.constexpr, block: tl.constexpr, block_rows: tl.constexpr,
    is_known: tl.constexpr, predicts: tl.constexpr, selects: tl.constexpr, tells: tl.constexpr,
):  # fmt: skip
    """Values to levels and scales, and the reference to what the other end makes of them."""
    of_head, link, group, head, row = _place(groups, heads, tokens // together, block_rows)
    column, _, digit, exists = _columns(together * dim, per, room, block)
    valid = row < tokens // together
    inside = valid[:, None] & exists[None, :]
    place = link + (link >= here) * here_count
    token, inner = _tokens(row, column, dim, together)
    start = _at(place, group, head, token, stride_place, stride_group, stride_head, stride_token)
    own = (of_head.to(tl.int64) * tokens + row * together)[:, None] * dim + column[None, :]
    value = tl.load(values + start + inner[None, :], mask=inside, other=0.0)
    if is_known:
        share = tl.load(shares + link) if predicts or tells else 0
        hoped, known, change = _expected(held, before, own, inside, share, predicts)
    slot = row
    if selects:
        slot = tl.load(numbers + (link * groups + group) * tokens + row, mask=valid, other=0) - 1
    goes = valid & (slot >= 0)
    line = ((group * heads + head) * (active // together) + slot).to(tl.int64)  # among those of the link
    far = payload + place.to(tl.int64) * stride_payload
    if tells:
        tl.store(far.to(tl.pointer_type(tl.uint8)) + told_at, share)  # by each program of a link, the same
    made = value
    if levels:
        difference = (value.to(tl.float32) - hoped.to(tl.float32)).to(value.dtype).to(tl.float32)
        difference = tl.where(inside, difference, 0.0)
        square = tl.sum(difference * difference, 1)
        if by_maximum:
            code = tl.ceil(tl.log2(tl.max(tl.abs(difference), 1) * root) * _PER_OCTAVE) + _ORIGIN
        else:
            code = tl.floor(tl.log2(tl.sqrt(square) * root) * _PER_OCTAVE + _ORIGIN + 0.5)
        code = tl.minimum(tl.maximum(code, 0.0), _NOT_FINITE - 1.0)
        code = tl.where(square < float("inf"), code, _NOT_FINITE).to(tl.int32)
        width = tl.load(table + code)[:, None] * width_of
        if levels > 6:
            level = tl.floor(tl.div_rn(difference, width))
            level = tl.where(level == level, level, 0.0) + levels // 2
            level = tl.minimum(tl.maximum(level, 0.0), levels - 1.0).to(tl.int32)
        else:  # the same without a division: a comparison for each edge between levels
            edge = tl.maximum(width, _LEAST)
            level = tl.zeros(difference.shape, tl.int32)
            for number in tl.static_range(1, levels):
                level += (difference >= (number - levels / 2) * edge).to(tl.int32)
            level = tl.where((code == _NOT_FINITE)[:, None], levels // 2, level)
        made = _restored(level, width, hoped, (levels - 1) / 2)
        digits = tl.where(inside, level, 0) * _weight(digit, levels, per)[None, :]
        packed = tl.sum(tl.reshape(digits, [block_rows, block // room, room]), 2)
        each = tl.arange(0, block // room)
        taken: tl.constexpr = (together * dim + per - 1) // per
        place_of = far + (line * taken)[:, None] + each[None, :]
        tl.store(place_of, packed.to(tl.uint8), mask=goes[:, None] & (each < taken)[None, :])
        tl.store(far + scales_at + line, code.to(tl.uint8), mask=goes)
    else:
        tl.store(far + (line * dim)[:, None] + column[None, :], value, mask=goes[:, None] & inside)
    if selects:
        made = tl.where(goes[:, None], made, hoped)
    if is_known:
        tl.store(now + own, made, mask=inside)
        lacking = (value.to(tl.float32) - made.to(tl.float32)).to(value.dtype).to(tl.float32)
        wanted = value.to(tl.float32)
        own_sums = sums + 4 * tl.program_id(0)
        tl.store(own_sums, tl.sum(tl.where(inside, lacking * lacking, 0.0)))
        tl.store(own_sums + 1, tl.sum(tl.where(inside, wanted * wanted, 0.0)))
        if predicts:
            counts, past = inside & (token % sample == 0), change.to(tl.float32)
            tl.store(own_sums + 2, tl.sum(tl.where(counts, (wanted - known.to(tl.float32)) * past, 0.0)))
            tl.store(own_sums + 3, tl.sum(tl.where(counts, past * past, 0.0)))
    else:
        tl.store(now + own, _finite(value), mask=inside)


@triton.jit
def _sums_kernel(sums, totals, again, links, programs, predicts: tl.constexpr, block: tl.constexpr):
    """What programs have found, (L, programs, 4), to what is lacking and wanted in all, and to the shares of changes
    that come again. By one program, which has little to do."""
    place = tl.arange(0, block)
    lacking, wanted = tl.zeros([block], tl.float32), tl.zeros([block], tl.float32)
    for link in range(links):
        found, whole = tl.zeros([block], tl.float32), tl.zeros([block], tl.float32)
        for first in range(0, programs, block):
            own = sums + 4 * (link * programs + first + place)
            inside = first + place < programs
            lacking += tl.load(own, mask=inside, other=0.0)
            wanted += tl.load(own + 1, mask=inside, other=0.0)
            if predicts:
                found += tl.load(own + 2, mask=inside, other=0.0)
                whole += tl.load(own + 3, mask=inside, other=0.0)
        if predicts:
            part = tl.floor(tl.sum(found) / tl.sum(whole) * _SHARES + 0.5)
            part = tl.where(part == part, tl.minimum(tl.maximum(part, 0.0), _SHARES), 0.0)
            tl.store(again + link, part.to(tl.uint8))
    tl.store(totals, tl.sum(lacking))
    tl.store(totals + 1, tl.sum(wanted))


@triton.jit
def _decode_kernel(
    payload, held, before, shares, numbers, table, now, target,
    groups, heads, tokens, active, here, here_count,
    stride_place, stride_group, stride_head, stride_token, stride_payload, scales_at, told_at,
    dim: tl.constexpr, together: tl.constexpr, levels: tl.constexpr, per: tl.constexpr, width_of: tl.constexpr,
    room: tl.constexpr, block: tl.constexpr, block_rows: tl.constexpr,
    is_known: tl.constexpr, predicts: tl.constexpr, selects: tl.constexpr, tells: tl.constexpr,
):  # fmt: skip
    """Levels and scales to values, in the reference and where attention reads them."""
    of_head, link, group, head, row = _place(groups, heads, tokens // together, block_rows)
    column, byte, digit, exists = _columns(together * dim, per, room, block)
    valid = row < tokens // together
    inside = valid[:, None] & exists[None, :]
    own = (of_head.to(tl.int64) * tokens + row * together)[:, None] * dim + column[None, :]
    place = link + (link >= here) * here_count
    far = payload + place.to(tl.int64) * stride_payload
    if is_known:
        if tells:
            share = tl.load(far.to(tl.pointer_type(tl.uint8)) + told_at)
        else:
            share = tl.load(shares + link) if predicts else 0
        hoped, _, _ = _expected(held, before, own, inside, share, predicts)
    slot = row
    if selects:
        slot = tl.load(numbers + (link * groups + group) * tokens + row, mask=valid, other=0) - 1
    goes = valid & (slot >= 0)
    line = ((group * heads + head) * (active // together) + slot).to(tl.int64)
    if levels:
        code = tl.load(far + scales_at + line, mask=goes, other=0).to(tl.int32)
        taken: tl.constexpr = (together * dim + per - 1) // per
        place_of = far + (line * taken)[:, None] + byte[None, :]
        packed = tl.load(place_of, mask=goes[:, None] & inside, other=0).to(tl.int32)
        if room == per:  # of as many bits each
            level = (packed >> (digit * (8 // per))[None, :]) & (levels - 1)
        else:
            level = packed // _weight(digit, levels, per)[None, :] % levels
        made = _restored(level, tl.load(table + code)[:, None] * width_of, hoped, (levels - 1) / 2)
    else:
        made = tl.load(far + (line * dim)[:, None] + column[None, :], mask=goes[:, None] & inside, other=0.0)
    if selects:
        made = tl.where(goes[:, None], made, hoped)
    if is_known:
        tl.store(now + own, made, mask=inside)
    else:
        tl.store(now + own, _finite(made), mask=inside)
    token, inner = _tokens(row, column, dim, together)
    start = _at(place, group, head, token, stride_place, stride_group, stride_head, stride_token)
    tl.store(target + start + inner[None, :], made, mask=inside)


def scores(values: torch.Tensor, known: Prediction, here: range | None) -> torch.Tensor:
    """See the package."""
    values, held = _rows_of(values), known.held
    links, groups, heads, tokens, dim = held.shape
    found = torch.empty(links, groups, tokens, device=values.device)
    block_dim = triton.next_power_of_2(dim)
    block = max(1, min(64, _VALUES // block_dim))
    _scores_kernel[(links * groups * triton.cdiv(tokens, block),)](
        values, held, _or(known.before, held), _or(known.shares, held), found,
        groups, heads, tokens, *_skipped(here, links), *values.stride()[:4],
        dim, block_dim, block, known.before is not None, enable_fp_fusion=False,
    )  # fmt: skip
    return found


def encode(
    values: torch.Tensor,
    known: Prediction | None,
    bits: float | None,
    active: ActiveTokens | None,
    payload: torch.Tensor,
    here: range | None,
    tells: bool = False,
) -> Encoded:
    """See the package."""
    values = _rows_of(values)
    places, *sizes = values.shape
    links = rows.others(places, here)
    now = values.new_empty(links, *sizes)
    form, grid = _Form.of(now.shape, bits, active, payload, values.dtype), _grid(bits)
    held, before, shares = known or (None, None, None)
    sums = torch.empty(*form.programs, 4, device=values.device) if known else None
    root = 1 / grid.reach if grid.by_maximum else (form.together * sizes[-1]) ** -0.5
    _encode_kernel[form.grid](
        values, _or(held, now), _or(before, now), _or(shares, now), _or(active and active.numbers, now),
        quantize.scale_table(values.device), form.payload, now, _or(sums, now),
        *sizes[:3], form.active, *_skipped(here, links), *values.stride()[:4], form.payload.stride(0),
        form.scales_at, form.told_at, root, sampled(sizes[2]),
        sizes[-1], form.together, grid.levels, grid.per_byte, grid.width, grid.by_maximum,
        form.room, form.block, form.block_rows, known is not None, before is not None, active is not None, tells,
        enable_fp_fusion=False,
    )  # fmt: skip
    if sums is None:
        return Encoded(now)
    totals = torch.empty(2, device=values.device)
    again = None if before is None else torch.empty(links, dtype=torch.uint8, device=values.device)
    _sums_kernel[(1,)](sums, totals, _or(again, now), *form.programs, before is not None, 1024)
    return Encoded(now, totals[0], totals[1], again)


def decode(
    payload: torch.Tensor,
    known: Prediction | None,
    bits: float | None,
    active: ActiveTokens | None,
    target: torch.Tensor,
    here: range | None,
    tells: bool = False,
) -> torch.Tensor:
    """See the package."""
    landing = target if target.stride(-1) == 1 else torch.empty_like(target, memory_format=torch.contiguous_format)
    places, *sizes = target.shape
    links = rows.others(places, here)
    now = target.new_empty(links, *sizes)
    form, grid = _Form.of(now.shape, bits, active, payload, target.dtype), _grid(bits)
    held, before, shares = known or (None, None, None)
    _decode_kernel[form.grid](
        form.payload, _or(held, now), _or(before, now), _or(shares, now), _or(active and active.numbers, now),
        quantize.scale_table(target.device), now, landing,
        *sizes[:3], form.active, *_skipped(here, links), *landing.stride()[:4], form.payload.stride(0),
        form.scales_at, form.told_at,
        sizes[-1], form.together, grid.levels, grid.per_byte, grid.width,
        form.room, form.block, form.block_rows, known is not None, before is not None, active is not None, tells,
        enable_fp_fusion=False,
    )  # fmt: skip
    if landing is not target:
        put_away(target, away(landing, here), here)
    return now


_AS_IT_IS = quantize.Grid(0, 1, 0.0)


def _grid(bits: float | None) -> quantize.Grid:
    return _AS_IT_IS if bits is None else quantize.GRIDS[bits]


class _Form(NamedTuple):
    """How values (L, G, H, T, D) are encoded by programs."""

    programs: tuple[int, int]
    """For each link."""
    together: int
    """Tokens of a row."""
    room: int
    """Columns for the values of a byte."""
    block: int
    """Columns of a program, of which some are empty."""
    block_rows: int
    """Rows of a program."""
    active: int
    """Tokens that are sent of each group."""
    payload: torch.Tensor
    """In the type in which it is written."""
    scales_at: int
    """Where scales begin in it."""
    told_at: int
    """Where the sender's share is, in bytes."""

    @classmethod
    def of(
        cls,
        shape: torch.Size,
        bits: float | None,
        active: ActiveTokens | None,
        payload: torch.Tensor,
        dtype: torch.dtype,
    ) -> "_Form":
        """For a codec, and a payload of bytes."""
        links, groups, heads, tokens, dim = shape
        sent = tokens if active is None else active.count
        together = 1 if bits is None else quantize.tokens_per_row(bits, dim, tokens, active is None)
        per = _grid(bits).per_byte
        row_bytes = triton.cdiv(together * dim, per)
        room = triton.next_power_of_2(per)
        block = triton.next_power_of_2(row_bytes) * room
        count = tokens // together
        block_rows = max(1, min(_VALUES // block, triton.next_power_of_2(count)))
        if payload.stride(-1) != 1:
            raise ValueError(f"bytes of a payload follow each other; its strides are {payload.stride()}")
        told_at = payload.shape[1] - rows.TOLD
        payload = typed(payload, dtype) if bits is None else payload
        scales_at = groups * heads * sent // together * row_bytes
        programs = links, groups * heads * triton.cdiv(count, block_rows)
        return cls(programs, together, room, block, block_rows, sent, payload, scales_at, told_at)

    @property
    def grid(self) -> tuple[int]:
        """Of programs."""
        return (math.prod(self.programs),)


def _rows_of(values: torch.Tensor) -> torch.Tensor:
    """Values whose last dim is contiguous."""
    return values if values.stride(-1) == 1 else values.contiguous()


def _skipped(here: range | None, links: int) -> tuple[int, int]:
    """The first of the places that are the rank's own, and their number."""
    return (links, 0) if here is None else (here.start, len(here))


def _or(given: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A tensor to pass where there may be none."""
    return other if given is None else given
