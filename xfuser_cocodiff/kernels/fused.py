"""The kernels in Triton: each reads and writes every tensor once. See the package for what they do.

A program takes rows of D values: some tokens of one head. Products and sums are not fused into one rounding: encoder
and decoder must come to the same bits.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from xfuser_cocodiff.kernels import quantise
from xfuser_cocodiff.kernels.layout import merged
from xfuser_cocodiff.kernels.rows import Active, Encoded, away, put_away, typed

_PER_OCTAVE, _ORIGIN = tl.constexpr(float(quantise.PER_OCTAVE)), tl.constexpr(float(quantise.ORIGIN))
_NOT_FINITE = tl.constexpr(float(quantise.NOT_FINITE))
_LEAST = tl.constexpr(torch.finfo(torch.float32).tiny)
"""In the place of no width."""
_VALUES = 4096
"""Of a program."""
_MOST_ROWS = 2**31 - _VALUES
"""That are counted in 32 bits."""


@triton.jit
def _place(groups, heads, tokens, block_rows: tl.constexpr):
    """The head that a program works on, by its number among all and by link, group and number, and the program's tokens
    of it. One head, so that divisions are made once for a program and not for each row. Programs lie on one axis of the
    grid: CUDA has room for 65,535 of them on any other."""
    blocks = tl.cdiv(tokens, block_rows)
    of_head = tl.program_id(0) // blocks
    pair = of_head // heads
    token = tl.program_id(0) % blocks * block_rows + tl.arange(0, block_rows)
    return of_head, pair // groups, pair % groups, of_head % heads, token


@triton.jit
def _at(place, group, head, token, stride_place, stride_group, stride_head, stride_token):
    """Where the values of a row begin in a tensor of any strides."""
    far = place.to(tl.int64) * stride_place + group.to(tl.int64) * stride_group
    return far + head.to(tl.int64) * stride_head + token.to(tl.int64) * stride_token


@triton.jit
def _expected(held, before, offsets, inside, predictor, predicts: tl.constexpr):
    """What both ends expect of values, rounded as tensors of their type are."""
    now = tl.load(held + offsets, mask=inside, other=0.0)
    if predicts:
        change = (now.to(tl.float32) - tl.load(before + offsets, mask=inside, other=0.0).to(tl.float32)).to(now.dtype)
        now = (now.to(tl.float32) + predictor * change.to(tl.float32)).to(now.dtype)
    return now


@triton.jit
def _restored(levels, width, base, half: tl.constexpr):
    """What both ends make of levels."""
    return ((levels.to(tl.float32) - (half - 0.5)) * width + base.to(tl.float32)).to(base.dtype)


@triton.jit
def _scores_kernel(
    values, held, before, found,
    groups, heads, tokens, here, stride_place, stride_group, stride_head, stride_token, predictor,
    dim: tl.constexpr, block_dim: tl.constexpr, block_tokens: tl.constexpr, predicts: tl.constexpr,
):  # fmt: skip
    """One program for some tokens of one group of one link, over all heads."""
    blocks, column = tl.cdiv(tokens, block_tokens), tl.arange(0, block_dim)
    pair = tl.program_id(0) // blocks
    token = tl.program_id(0) % blocks * block_tokens + tl.arange(0, block_tokens)
    link, group = pair // groups, pair % groups
    place = link + (link >= here)
    inside = (token < tokens)[:, None] & (column < dim)[None, :]
    total = tl.zeros([block_tokens], tl.float32)
    for head in range(heads):
        own = ((pair.to(tl.int64) * heads + head) * tokens + token)[:, None] * dim + column[None, :]
        start = _at(place, group, head + 0 * token, token, stride_place, stride_group, stride_head, stride_token)
        value = tl.load(values + start[:, None] + column[None, :], mask=inside, other=0.0)
        hoped = _expected(held, before, own, inside, predictor, predicts)
        away = (value.to(tl.float32) - hoped.to(tl.float32)).to(value.dtype).to(tl.float32)
        total += tl.sum(tl.where(inside, away * away, 0.0), 1)
    tl.store(found + pair.to(tl.int64) * tokens + token, total, mask=token < tokens)


@triton.jit
def _finite(values):
    """Zeros in the place of what is not finite, which is no reference for later values."""
    return tl.where(tl.abs(values.to(tl.float32)) < float("inf"), values, 0.0).to(values.dtype)


@triton.jit
def _encode_kernel(
    values, held, before, numbers, table, payload, now, sums,
    groups, heads, tokens, active, here,
    stride_place, stride_group, stride_head, stride_token, stride_payload, scales_at, predictor, step, root,
    dim: tl.constexpr, block_dim: tl.constexpr, block_rows: tl.constexpr, bits: tl.constexpr,
    predicts: tl.constexpr, selects: tl.constexpr,
):  # fmt: skip
    """Values to levels and scales, and the reference to what the other end makes of them."""
    of_head, link, group, head, token = _place(groups, heads, tokens, block_rows)
    column = tl.arange(0, block_dim)
    valid = token < tokens
    inside = valid[:, None] & (column < dim)[None, :]
    place = link + (link >= here)
    start = _at(place, group, head, token, stride_place, stride_group, stride_head, stride_token)
    own = (of_head.to(tl.int64) * tokens + token)[:, None] * dim + column[None, :]
    value = tl.load(values + start[:, None] + column[None, :], mask=inside, other=0.0)
    if bits or selects:
        hoped = _expected(held, before, own, inside, predictor, predicts)
    slot = token
    if selects:
        slot = tl.load(numbers + (link * groups + group) * tokens + token, mask=valid, other=0) - 1
    goes = valid & (slot >= 0)
    line = ((group * heads + head) * active + slot).to(tl.int64)  # among those of the link
    far = payload + place.to(tl.int64) * stride_payload
    made = value
    if bits:
        difference = (value.to(tl.float32) - hoped.to(tl.float32)).to(value.dtype).to(tl.float32)
        difference = tl.where(inside, difference, 0.0)
        scale = tl.sqrt(tl.sum(difference * difference, 1)) * root
        code = tl.floor(tl.log2(scale) * _PER_OCTAVE + _ORIGIN + 0.5)
        code = tl.minimum(tl.maximum(code, 0.0), _NOT_FINITE - 1.0)
        code = tl.where(scale < float("inf"), code, _NOT_FINITE).to(tl.int32)
        width = tl.load(table + code)[:, None] * step
        half: tl.constexpr = 2 ** (bits - 1)
        if bits > 2:
            level = tl.floor(tl.div_rn(difference, width))
            level = tl.where(level == level, level, 0.0) + half
            level = tl.minimum(tl.maximum(level, 0.0), 2.0**bits - 1.0).to(tl.int32)
        else:  # the same without a division: a comparison for each edge between levels
            edge = tl.maximum(width, _LEAST)
            level = (difference >= 0.0).to(tl.int32)
            if bits == 2:
                level += (difference >= edge).to(tl.int32) + (difference >= -edge).to(tl.int32)
            level = tl.where((code == _NOT_FINITE)[:, None], half, level)
        made = _restored(level, width, hoped, half)
        per: tl.constexpr = 8 // bits
        packed = tl.reshape(tl.where(inside, level, 0), [block_rows, block_dim // per, per])
        packed = tl.sum(packed << (tl.arange(0, per) * bits)[None, None, :], 2)
        byte = tl.arange(0, block_dim // per)
        place_of = far + (line * (dim // per))[:, None] + byte[None, :]
        tl.store(place_of, packed.to(tl.uint8), mask=goes[:, None] & (byte < dim // per)[None, :])
        tl.store(far + scales_at + line, code.to(tl.uint8), mask=goes)
    else:
        tl.store(far + (line * dim)[:, None] + column[None, :], value, mask=goes[:, None] & inside)
    if selects:
        made = tl.where(goes[:, None], made, hoped)
    if bits or selects:
        tl.store(now + own, made, mask=inside)
        lacking = (value.to(tl.float32) - made.to(tl.float32)).to(value.dtype).to(tl.float32)
        wanted = value.to(tl.float32)
        own_sums = sums + 2 * tl.program_id(0)
        tl.store(own_sums, tl.sum(tl.where(inside, lacking * lacking, 0.0)))
        tl.store(own_sums + 1, tl.sum(tl.where(inside, wanted * wanted, 0.0)))
    else:
        tl.store(now + own, _finite(value), mask=inside)


@triton.jit
def _decode_kernel(
    payload, held, before, numbers, table, now, target,
    groups, heads, tokens, active, here,
    stride_place, stride_group, stride_head, stride_token, stride_payload, scales_at, predictor, step,
    dim: tl.constexpr, block_dim: tl.constexpr, block_rows: tl.constexpr, bits: tl.constexpr,
    predicts: tl.constexpr, selects: tl.constexpr,
):  # fmt: skip
    """Levels and scales to values, in the reference and where attention reads them."""
    of_head, link, group, head, token = _place(groups, heads, tokens, block_rows)
    column = tl.arange(0, block_dim)
    valid = token < tokens
    inside = valid[:, None] & (column < dim)[None, :]
    own = (of_head.to(tl.int64) * tokens + token)[:, None] * dim + column[None, :]
    if bits or selects:
        hoped = _expected(held, before, own, inside, predictor, predicts)
    slot = token
    if selects:
        slot = tl.load(numbers + (link * groups + group) * tokens + token, mask=valid, other=0) - 1
    goes = valid & (slot >= 0)
    line = ((group * heads + head) * active + slot).to(tl.int64)
    place = link + (link >= here)
    far = payload + place.to(tl.int64) * stride_payload
    if bits:
        per: tl.constexpr = 8 // bits
        half: tl.constexpr = 2 ** (bits - 1)
        code = tl.load(far + scales_at + line, mask=goes, other=0).to(tl.int32)
        place_of = far + (line * (dim // per))[:, None] + (column // per)[None, :]
        packed = tl.load(place_of, mask=goes[:, None] & inside, other=0).to(tl.int32)
        level = (packed >> (column % per * bits)[None, :]) & (2**bits - 1)
        made = _restored(level, tl.load(table + code)[:, None] * step, hoped, half)
    else:
        made = tl.load(far + (line * dim)[:, None] + column[None, :], mask=goes[:, None] & inside, other=0.0)
    if selects:
        made = tl.where(goes[:, None], made, hoped)
    if bits or selects:
        tl.store(now + own, made, mask=inside)
    else:
        tl.store(now + own, _finite(made), mask=inside)
    start = _at(place, group, head, token, stride_place, stride_group, stride_head, stride_token)
    tl.store(target + start[:, None] + column[None, :], made, mask=inside)


@triton.jit
def _move_kernel(
    source, target, rows, columns, size1, size2, size3, size4,
    from0, from1, from2, from3, from4, to0, to1, to2, to3, to4,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """Rows of values that follow each other in both tensors."""
    blocks = tl.cdiv(columns, block_columns)
    row = tl.program_id(0) // blocks * block_rows + tl.arange(0, block_rows)
    first = tl.program_id(0) % blocks * block_columns  # in 64 bits where columns are counted so
    column = tl.arange(0, block_columns)
    i4 = (row % size4).to(tl.int64)
    i3 = (row // size4 % size3).to(tl.int64)
    i2 = (row // (size4 * size3) % size2).to(tl.int64)
    i1 = (row // (size4 * size3 * size2) % size1).to(tl.int64)
    i0 = (row // (size4 * size3 * size2 * size1)).to(tl.int64)
    here = first + i0 * from0 + i1 * from1 + i2 * from2 + i3 * from3 + i4 * from4
    there = first + i0 * to0 + i1 * to1 + i2 * to2 + i3 * to3 + i4 * to4
    inside = (row < rows)[:, None] & (column < columns - first)[None, :]
    value = tl.load(source + here[:, None] + column[None, :], mask=inside)
    tl.store(target + there[:, None] + column[None, :], value, mask=inside)


def scores(
    values: torch.Tensor, held: torch.Tensor, before: torch.Tensor | None, predictor: float, here: int | None
) -> torch.Tensor:
    """See the package."""
    values = _rows_of(values)
    links, groups, heads, tokens, dim = held.shape
    found = torch.empty(links, groups, tokens, device=values.device)
    block_dim = triton.next_power_of_2(dim)
    block = max(1, min(64, _VALUES // block_dim))
    _scores_kernel[(links * groups * triton.cdiv(tokens, block),)](
        values, held, _or(before, held), found,
        groups, heads, tokens, _skipped(here, links), *values.stride()[:4], predictor,
        dim, block_dim, block, before is not None, enable_fp_fusion=False,
    )  # fmt: skip
    return found


def encode(
    values: torch.Tensor,
    held: torch.Tensor | None,
    before: torch.Tensor | None,
    predictor: float,
    bits: int | None,
    active: Active | None,
    payload: torch.Tensor,
    here: int | None,
) -> Encoded:
    """See the package."""
    values, is_exact = _rows_of(values), bits is None and active is None
    places, *sizes = values.shape
    links = places - (here is not None)
    now = values.new_empty(links, *sizes)
    form = _Form.of(now.shape, bits, active, payload, values.dtype)
    sums = None if is_exact else torch.empty(*form.grid, 2, device=values.device)
    _encode_kernel[form.grid](
        values, _or(held, now), _or(before, now), _or(active and active.numbers, now),
        quantise.scale_table(values.device), form.payload, now, _or(sums, now),
        *sizes[:3], form.active, _skipped(here, links), *values.stride()[:4], form.payload.stride(0), form.scales_at,
        predictor, quantise.STEPS.get(bits or 0, 0.0), sizes[-1] ** -0.5,
        sizes[-1], form.block_dim, form.block_rows, bits or 0, before is not None, active is not None,
        enable_fp_fusion=False,
    )  # fmt: skip
    return Encoded(now) if sums is None else Encoded(now, *sums.sum(0))


def decode(
    payload: torch.Tensor,
    held: torch.Tensor | None,
    before: torch.Tensor | None,
    predictor: float,
    bits: int | None,
    active: Active | None,
    target: torch.Tensor,
    here: int | None,
) -> torch.Tensor:
    """See the package."""
    landing = target if target.stride(-1) == 1 else torch.empty_like(target, memory_format=torch.contiguous_format)
    places, *sizes = target.shape
    links = places - (here is not None)
    now = target.new_empty(links, *sizes)
    form = _Form.of(now.shape, bits, active, payload, target.dtype)
    _decode_kernel[form.grid](
        form.payload, _or(held, now), _or(before, now), _or(active and active.numbers, now),
        quantise.scale_table(target.device), now, landing,
        *sizes[:3], form.active, _skipped(here, links), *landing.stride()[:4], form.payload.stride(0), form.scales_at,
        predictor, quantise.STEPS.get(bits or 0, 0.0),
        sizes[-1], form.block_dim, form.block_rows, bits or 0, before is not None, active is not None,
        enable_fp_fusion=False,
    )  # fmt: skip
    if landing is not target:
        put_away(target, away(landing, here), here)
    return now


def move(target: torch.Tensor, source: torch.Tensor) -> None:
    """See the package."""
    layout = merged(target.shape, target.stride(), source.stride())
    if layout is None or target.numel() == 0 or layout.rows > _MOST_ROWS:
        target.copy_(source)
        return
    rows, columns = layout.rows, layout.columns
    block_columns = min(1024, triton.next_power_of_2(columns))
    block_rows = max(1, _VALUES // block_columns)
    _move_kernel[(triton.cdiv(rows, block_rows) * triton.cdiv(columns, block_columns),)](
        source, target, rows, columns, *layout.sizes[1:], *layout.source_strides, *layout.target_strides,
        block_rows, block_columns,
    )  # fmt: skip


class _Form(NamedTuple):
    """How values (L, G, H, T, D) are encoded by programs."""

    grid: tuple[int]
    block_dim: int
    """Columns of a program, of which those above D are empty."""
    block_rows: int
    """Tokens of a program."""
    active: int
    """Tokens that are sent of each group."""
    payload: torch.Tensor
    """In the type in which it is written."""
    scales_at: int
    """Where scales begin in it."""

    @classmethod
    def of(
        cls, shape: torch.Size, bits: int | None, active: Active | None, payload: torch.Tensor, dtype: torch.dtype
    ) -> "_Form":
        """For a codec, and a payload of bytes."""
        *heads, tokens, dim = shape
        sent = tokens if active is None else active.count
        block_dim = triton.next_power_of_2(dim)
        block = max(1, min(_VALUES // block_dim, triton.next_power_of_2(tokens)))
        grid = (math.prod(heads) * triton.cdiv(tokens, block),)
        if payload.stride(-1) != 1:
            raise ValueError(f"bytes of a payload follow each other; its strides are {payload.stride()}")
        payload = typed(payload, dtype) if bits is None else payload
        return cls(grid, block_dim, block, sent, payload, math.prod(heads[1:]) * sent * dim * (bits or 0) // 8)


def _rows_of(values: torch.Tensor) -> torch.Tensor:
    """Values whose last dim is contiguous."""
    return values if values.stride(-1) == 1 else values.contiguous()


def _skipped(here: int | None, links: int) -> int:
    return links if here is None else here


def _or(given: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A tensor to pass where there may be none."""
    return other if given is None else given
