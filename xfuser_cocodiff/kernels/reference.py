"""The kernels in plain PyTorch; see the package for what they do."""

import math

import torch

from xfuser_cocodiff.kernels import Coded, away, put_away
from xfuser_cocodiff.quantise import dequantise, quantise

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
    held: torch.Tensor,
    before: torch.Tensor | None,
    predictor: float,
    bits: int | None,
    chosen: torch.Tensor | None,
    here: int | None,
) -> Coded:
    """See the package."""
    values = away(values, here)
    hoped = expected(held, before, predictor)
    part = _part(values, chosen)
    if bits is None:
        payload = bytes_of(part)
    else:
        base = _part(hoped, chosen)
        packed, scales, difference = quantise(part - base, bits)
        payload = torch.cat([scales.flatten(1), packed.flatten(1)], 1)
        part = _moved(base, difference)
    now = _with(hoped, part, chosen, before is not None)
    return Coded(payload, now, square(values - now), square(values))


def decode(
    payload: torch.Tensor,
    held: torch.Tensor,
    before: torch.Tensor | None,
    predictor: float,
    bits: int | None,
    chosen: torch.Tensor | None,
    target: torch.Tensor | None,
    here: int | None,
) -> torch.Tensor:
    """See the package."""
    # A copy, whatever its strides: values of several bytes are read from it, at a multiple of their size.
    payload = payload.clone(memory_format=torch.contiguous_format)
    hoped = expected(held, before, predictor)
    base = _part(hoped, chosen)
    if bits is None:
        part = values_of(payload, base)
    else:
        rows, width = math.prod(base.shape[1:-1]), base.shape[-1] * bits // 8
        scales, packed = payload.split([rows, payload.shape[1] - rows], 1)
        packed, scales = packed.reshape(*base.shape[:-1], width), scales.reshape(*base.shape[:-1], 1)
        part = _moved(base, dequantise(packed, scales, bits))
    now = _with(hoped, part, chosen, before is not None)
    if target is not None:
        put_away(target, now, here)
    return now


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Values (L, ...) as uint8 (L, n)."""
    # Flat, since no token may be active, and then shapes of several dims say nothing.
    return values.contiguous().flatten().view(torch.uint8).view(len(values), values.nbytes // len(values))


def values_of(payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`bytes_of`."""
    return payload.flatten().view(like.dtype).view(like.shape)


def square(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares, float32."""
    return torch.linalg.vector_norm(values, dtype=torch.float32).square_()


def _moved(base: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
    """What both ends make of a quantised difference."""
    return difference.add_(base).to(base.dtype)


def _part(values: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
    if chosen is None:
        return values
    part = values.flatten(0, _TOKENS).index_select(0, _rows(chosen, values))
    return part.view(*values.shape[:_TOKENS], -1, values.shape[-1])


def _with(values: torch.Tensor, part: torch.Tensor, chosen: torch.Tensor | None, is_own: bool) -> torch.Tensor:
    """Values with a part of them replaced; in their place where nobody else has them."""
    if chosen is None:
        return part
    rows, index = values.flatten(0, _TOKENS), _rows(chosen, values)
    copy = rows.index_copy_ if is_own else rows.index_copy
    return copy(0, index, part.flatten(0, _TOKENS)).view(values.shape)


def _rows(chosen: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Where chosen tokens lie among all rows of D values. Whole rows move several times as fast as single values."""
    links, groups, heads, tokens, _ = values.shape
    starts = torch.arange(0, links * groups * heads * tokens, tokens, device=values.device)
    return (starts.view(links, groups, heads, 1) + chosen[:, :, None]).flatten()
