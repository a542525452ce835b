"""The kernels in plain PyTorch; see the package for what they do."""

import math

import torch

from xfuser_cocodiff.engine.kernels.quantize import dequantize, quantize, row_bytes, tokens_per_row
from xfuser_cocodiff.engine.kernels.rows import (
    SHARES,
    TOLD,
    ActiveTokens,
    Encoded,
    Prediction,
    away,
    put_away,
    sampled,
    typed,
)

_TOKENS = 3


def expected(known: Prediction) -> torch.Tensor:
    """What both ends expect of the values."""
    if known.before is None or known.shares is None:
        return known.held
    shares = (known.shares / SHARES).to(known.held.dtype).view(-1, 1, 1, 1, 1)
    return (known.held - known.before).mul_(shares).add_(known.held)


def scores(values: torch.Tensor, known: Prediction, here: range | None) -> torch.Tensor:
    """See the package."""
    return (away(values, here) - expected(known)).float().square_().sum((2, 4))


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
    values = away(values, here)
    if known is None:
        put_away(_values_in(payload, values), values, here)
        return Encoded(_kept(values))
    if tells and known.shares is not None:
        payload, told = payload.tensor_split([-TOLD], 1)
        put_away(told, known.shares[:, None].expand(-1, TOLD), here)
    hoped = expected(known)
    part = _part(values, active)
    if bits is None:
        put_away(_values_in(payload, part), part, here)
    else:
        base = _part(hoped, active)
        difference = torch.sub(part, base, out=torch.empty_like(base))
        packed, scales, made = quantize(_in_rows(difference, bits, active), bits)
        for room, found in zip(_encoded_in(payload, base, bits, active), (packed, scales), strict=True):
            put_away(room, found, here)
        part = _moved(base, made)
    now = _with(hoped, part, active, known.before is not None)
    return Encoded(now, square(values - now), square(values), _again(values, known))


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
    if known is None:
        sent = away(_values_in(payload, target), here)
        put_away(target, sent, here)
        return _kept(sent)
    if tells:
        payload, told = payload.tensor_split([-TOLD], 1)
        known = known._replace(shares=away(told, here)[:, 0])
    hoped = expected(known)
    base = _part(hoped, active)
    if bits is None:
        part = away(_values_in(payload, base), here)
    else:
        levels, scales = (away(part, here) for part in _encoded_in(payload, base, bits, active))
        part = _moved(base, dequantize(levels, scales, bits, _in_rows(base, bits, active).shape[-1]))
    now = _with(hoped, part, active, known.before is not None)
    put_away(target, now, here)
    return now


def _again(values: torch.Tensor, known: Prediction) -> torch.Tensor | None:
    """The share of a change that has come again, by least squares over some of the tokens."""
    if known.before is None:
        return None
    every = slice(None, None, sampled(values.shape[_TOKENS]))
    now, held, before = (each[:, :, :, every].float() for each in (values, known.held, known.before))
    change = held - before
    found, whole = (each.sum((1, 2, 3, 4)) for each in ((now - held) * change, change.square()))
    return (found / whole * SHARES).round_().nan_to_num_(0.0).clamp_(0, SHARES).to(torch.uint8)


def _kept(values: torch.Tensor) -> torch.Tensor:
    """What both ends hold of values that were sent as they are: nothing that is not finite is a reference."""
    return torch.nan_to_num(values, 0.0, 0.0, 0.0).contiguous()


def _values_in(payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Bytes (P, n) as values of the shape (P, ...), in their place."""
    return typed(payload, like.dtype).view(len(payload), *like.shape[1:])


def _in_rows(values: torch.Tensor, bits: float, active: ActiveTokens | None) -> torch.Tensor:
    """Values (L, G, H, T, D) by what shares a scale, (L, G, H, rows, values of a row)."""
    *outer, tokens, dim = values.shape
    together = tokens_per_row(bits, dim, tokens, active is None)
    return values.reshape(*outer, tokens // together, together * dim)


def _encoded_in(
    payload: torch.Tensor, like: torch.Tensor, bits: float, active: ActiveTokens | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels (P, G, H, rows, bytes of a row) and scales (P, G, H, rows, 1) in bytes (P, n), in their place, for values
    (L, G, H, T, D)."""
    _, *rows, size = _in_rows(like, bits, active).shape
    width = row_bytes(bits, size)
    levels, scales = payload.split([math.prod(rows) * width, math.prod(rows)], 1)
    return levels.view(len(payload), *rows, width), scales.view(len(payload), *rows, 1)


def square(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares, float32."""
    return torch.linalg.vector_norm(values, dtype=torch.float32).square_()


def _moved(base: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
    """What both ends make of a quantised difference, which is in rows."""
    return difference.view(base.shape).add_(base).to(base.dtype)


def _part(values: torch.Tensor, active: ActiveTokens | None) -> torch.Tensor:
    if active is None:
        return values
    part = values.flatten(0, _TOKENS).index_select(0, _rows(active, values))
    return part.view(*values.shape[:_TOKENS], active.count, values.shape[-1])


def _with(values: torch.Tensor, part: torch.Tensor, active: ActiveTokens | None, is_own: bool) -> torch.Tensor:
    """Values with a part of them replaced; in their place where nobody else has them."""
    if active is None:
        return part
    rows, index = values.flatten(0, _TOKENS), _rows(active, values)
    copy = rows.index_copy_ if is_own else rows.index_copy
    return copy(0, index, part.flatten(0, _TOKENS)).view(values.shape)


def _rows(active: ActiveTokens, values: torch.Tensor) -> torch.Tensor:
    """Where active tokens lie among all rows of D values. Whole rows move several times as fast as single values."""
    links, groups, heads, tokens, _ = values.shape
    starts = torch.arange(0, links * groups * heads * tokens, tokens, device=values.device)
    return (starts.view(links, groups, heads, 1) + active.indices[:, :, None]).flatten()
