"""The kernels in plain PyTorch; see the package for what they do."""

import math

import torch

from xfuser_cocodiff.kernels.quantise import dequantise, quantise
from xfuser_cocodiff.kernels.rows import Active, Encoded, away, put_away, typed

_TOKENS = 3


def expected(held: torch.Tensor, before: torch.Tensor | None, predictor: float) -> torch.Tensor:
    """What both ends expect of the values."""
    return held if before is None else torch.add(held, held - before, alpha=predictor)


def scores(
    values: torch.Tensor, held: torch.Tensor, before: torch.Tensor | None, predictor: float, here: int | None
) -> torch.Tensor:
    """See the package."""
    return (away(values, here) - expected(held, before, predictor)).float().square_().sum((2, 4))


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
    values = away(values, here)
    if bits is None and active is None:
        put_away(_values_in(payload, values), values, here)
        return Encoded(_kept(values))
    hoped = expected(held, before, predictor)
    part = _part(values, active)
    if bits is None:
        put_away(_values_in(payload, part), part, here)
    else:
        base = _part(hoped, active)
        packed, scales, difference = quantise(part - base, bits)
        for room, found in zip(_encoded_in(payload, base, bits), (packed, scales), strict=True):
            put_away(room, found, here)
        part = _moved(base, difference)
    now = _with(hoped, part, active, before is not None)
    return Encoded(now, square(values - now), square(values))


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
    if bits is None and active is None:
        sent = away(_values_in(payload, target), here)
        put_away(target, sent, here)
        return _kept(sent)
    hoped = expected(held, before, predictor)
    base = _part(hoped, active)
    if bits is None:
        part = away(_values_in(payload, base), here)
    else:
        levels, scales = (away(part, here) for part in _encoded_in(payload, base, bits))
        part = _moved(base, dequantise(levels, scales, bits))
    now = _with(hoped, part, active, before is not None)
    put_away(target, now, here)
    return now


def _kept(values: torch.Tensor) -> torch.Tensor:
    """What both ends hold of values that were sent as they are: nothing that is not finite is a reference."""
    return torch.nan_to_num(values, 0.0, 0.0, 0.0).contiguous()


def _values_in(payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Bytes (P, n) as values of the shape (P, ...), in their place."""
    return typed(payload, like.dtype).view(len(payload), *like.shape[1:])


def _encoded_in(payload: torch.Tensor, like: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels (P, ..., D * bits / 8) and scales (P, ..., 1) in bytes (P, n), in their place, for values (L, ..., D)."""
    rows, width = like.shape[1:-1], like.shape[-1] * bits // 8
    levels, scales = payload.split([math.prod(rows) * width, math.prod(rows)], 1)
    return levels.view(len(payload), *rows, width), scales.view(len(payload), *rows, 1)


def square(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares, float32."""
    return torch.linalg.vector_norm(values, dtype=torch.float32).square_()


def _moved(base: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
    """What both ends make of a quantised difference."""
    return difference.add_(base).to(base.dtype)


def _part(values: torch.Tensor, active: Active | None) -> torch.Tensor:
    if active is None:
        return values
    part = values.flatten(0, _TOKENS).index_select(0, _rows(active, values))
    return part.view(*values.shape[:_TOKENS], active.count, values.shape[-1])


def _with(values: torch.Tensor, part: torch.Tensor, active: Active | None, is_own: bool) -> torch.Tensor:
    """Values with a part of them replaced; in their place where nobody else has them."""
    if active is None:
        return part
    rows, index = values.flatten(0, _TOKENS), _rows(active, values)
    copy = rows.index_copy_ if is_own else rows.index_copy
    return copy(0, index, part.flatten(0, _TOKENS)).view(values.shape)


def _rows(active: Active, values: torch.Tensor) -> torch.Tensor:
    """Where active tokens lie among all rows of D values. Whole rows move several times as fast as single values."""
    links, groups, heads, tokens, _ = values.shape
    starts = torch.arange(0, links * groups * heads * tokens, tokens, device=values.device)
    return (starts.view(links, groups, heads, 1) + active.indices[:, :, None]).flatten()
