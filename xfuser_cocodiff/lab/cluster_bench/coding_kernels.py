"""Kernels of other systems as PyTorch operators: each is one launch that reads its inputs and writes its outputs once.

They have fused kernels (Triton or CUDA, or what `torch.compile` makes of theirs), so one operator stands for one of
them: a chain of PyTorch operators would read and write more. On fake tensors only the shapes are computed.

Sizes in shapes: D values of a row, n bytes of its code; B batch, H heads, S sequence.
"""

import math
from collections.abc import Callable, Sequence

import torch

from xfuser_cocodiff.lab.comparison.row_codes import CODES, FP8_LARGEST

RAW = ""
"""Name of the code that leaves values as they are."""
_LIBRARY = torch.library.Library("cocodiff_lab", "DEF")
_STEPS_PER_BYTE = 4
"""2-bit steps in a byte."""
_LEVELS = (-0.5, -2.0, 0.5, 2.0)
"""CompactFusion's values of the 2-bit steps 0 to 3, in scales: the high bit is the sign, the low bit the magnitude."""
Statistics = Sequence[torch.Tensor | None]


def row_bytes(code: str, dim: int, itemsize: int) -> int:
    """Return the bytes of an encoded row of `dim` values of `itemsize` bytes."""
    return dim * itemsize if code == RAW else CODES[code].row_bytes(dim)


def encode_rows(rows: Sequence[torch.Tensor], codes: Sequence[str], statistics: Statistics) -> torch.Tensor:
    """Return rows (..., D) of tensors of the same shape as one contiguous message, uint8 (..., sum of n)."""
    return torch.ops.cocodiff_lab.encode_rows(rows, codes, statistics)


def decode_rows(
    message: torch.Tensor, codes: Sequence[str], dims: Sequence[int], statistics: Statistics, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return contiguous rows (..., D) of each tensor of a message, uint8 (..., sum of n)."""
    return torch.ops.cocodiff_lab.decode_rows(message, codes, dims, statistics, dtype)


def column_statistics(tensors: Sequence[torch.Tensor], kinds: Sequence[str]) -> torch.Tensor:
    """Return the mean or the largest magnitude of columns of (B, H, S, D) over their tokens: float32 (N, B, H, 1, D).

    Args:
        tensors: N tensors of the same shape.
        kinds: `mean` or `amax` for each.
    """
    return torch.ops.cocodiff_lab.column_statistics(tensors, kinds)


def merge_statistics(gathered: torch.Tensor, kinds: Sequence[str]) -> list[torch.Tensor]:
    """Return the mean, or the FP8 scale for the largest magnitude, of columns over all ranks: N of (B, H, 1, D).

    Args:
        gathered: statistics of each rank's tokens, of which all have equally many, (P, N, B, H, 1, D).
        kinds: `mean` or `amax` for each.
    """
    return torch.ops.cocodiff_lab.merge_statistics(gathered, kinds)


def encode_residual(
    values: torch.Tensor, base: torch.Tensor, channel_scale: torch.Tensor, token_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize K and V minus a base to 2 bits by CompactFusion's rule.

    Args:
        values: K and V, shape (2, B, H, S, D).
        base: what the receivers hold, shape (2, B, H, S, D).
        channel_scale: shape (2, 1, H, 1, D).
        token_scale: shape (2, B, 1, S, 1).

    Returns:
        The message, uint8 (n) with its scales as float16, and the next base.
    """
    return torch.ops.cocodiff_lab.encode_residual(values, base, channel_scale, token_scale)


def decode_residual(message: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return a base (2, B, H, S, D) plus the residual of a message of :func:`encode_residual`."""
    return torch.ops.cocodiff_lab.decode_residual(message, base)


def residual_bytes(shape: Sequence[int]) -> int:
    """Return the bytes of a message of :func:`encode_residual` for K and V (2, B, H, S, D)."""
    pair, batch, heads, tokens, dim = shape
    return math.prod(shape) // _STEPS_PER_BYTE + 2 * pair * (heads * dim + batch * tokens)


# Implementations on tensors with values.


def _encode_rows(rows: Sequence[torch.Tensor], codes: Sequence[str], statistics: Statistics) -> torch.Tensor:
    parts = [
        each.contiguous().view(torch.uint8) if code == RAW else CODES[code].encode(each.float(), statistic)
        for each, code, statistic in zip(rows, codes, statistics, strict=True)
    ]
    return torch.cat(parts, -1)


def _decode_rows(
    message: torch.Tensor, codes: Sequence[str], dims: Sequence[int], statistics: Statistics, dtype: torch.dtype
) -> list[torch.Tensor]:
    sizes = [row_bytes(code, dim, dtype.itemsize) for code, dim in zip(codes, dims, strict=True)]
    return [
        part.clone(memory_format=torch.contiguous_format).view(dtype)
        if code == RAW
        else CODES[code].decode(part, statistic).to(dtype).contiguous()
        for part, code, statistic in zip(message.split(sizes, -1), codes, statistics, strict=True)
    ]


def _column_statistics(tensors: Sequence[torch.Tensor], kinds: Sequence[str]) -> torch.Tensor:
    return torch.stack(
        [
            each.float().mean(2, keepdim=True) if kind == "mean" else each.float().abs().amax(2, keepdim=True)
            for each, kind in zip(tensors, kinds, strict=True)
        ]
    )


def _merge_statistics(gathered: torch.Tensor, kinds: Sequence[str]) -> list[torch.Tensor]:
    return [
        of_ranks.mean(0) if kind == "mean" else of_ranks.amax(0).clamp(min=1e-6) / FP8_LARGEST
        for of_ranks, kind in zip(gathered.unbind(1), kinds, strict=True)
    ]


def _encode_residual(
    values: torch.Tensor, base: torch.Tensor, channel_scale: torch.Tensor, token_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scales = [scale.to(torch.float16) for scale in (channel_scale, token_scale)]
    difference = values.float() - base.float()
    threshold = scales[0].float() * scales[1].float()
    steps = ((difference >= 0).to(torch.uint8) << 1) | (difference.abs() > threshold).to(torch.uint8)
    quads = steps.flatten().unflatten(0, (-1, _STEPS_PER_BYTE))
    packed = quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6
    message = torch.cat([packed, *(scale.flatten().view(torch.uint8) for scale in scales)])
    return message, _decode_residual(message, base)


def _decode_residual(message: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    pair, batch, heads, tokens, dim = base.shape
    sizes = [base.numel() // _STEPS_PER_BYTE, 2 * pair * heads * dim, 2 * pair * batch * tokens]
    packed, channel, token = message.split(sizes)
    steps = torch.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], -1).view(base.shape)
    scales = [scale.clone().view(torch.float16).float() for scale in (channel, token)]
    threshold = scales[0].view(pair, 1, heads, 1, dim) * scales[1].view(pair, batch, 1, tokens, 1)
    return (base.float() + base.new_tensor(_LEVELS, dtype=torch.float32)[steps.long()] * threshold).to(base.dtype)


# Shapes, for fake tensors.


def _like_encoded_rows(rows: Sequence[torch.Tensor], codes: Sequence[str], _: Statistics) -> torch.Tensor:
    size = sum(row_bytes(code, each.shape[-1], each.element_size()) for each, code in zip(rows, codes, strict=True))
    return rows[0].new_empty((*rows[0].shape[:-1], size), dtype=torch.uint8)


def _like_decoded_rows(
    message: torch.Tensor, codes: Sequence[str], dims: Sequence[int], _: Statistics, dtype: torch.dtype
) -> list[torch.Tensor]:
    return [message.new_empty((*message.shape[:-1], dim), dtype=dtype) for dim in dims]


def _like_statistics(tensors: Sequence[torch.Tensor], kinds: Sequence[str]) -> torch.Tensor:
    batch, heads, _, dim = tensors[0].shape
    return tensors[0].new_empty((len(tensors), batch, heads, 1, dim), dtype=torch.float32)


def _like_merged_statistics(gathered: torch.Tensor, kinds: Sequence[str]) -> list[torch.Tensor]:
    return [torch.empty_like(of_ranks[0]) for of_ranks in gathered.unbind(1)]


def _like_residual(
    values: torch.Tensor, base: torch.Tensor, channel_scale: torch.Tensor, token_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return values.new_empty(residual_bytes(values.shape), dtype=torch.uint8), torch.empty_like(base)


def _define(schema: str, run: Callable, fake: Callable) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_LIBRARY.ns}::{name}", fake, lib=_LIBRARY)


_define("encode_rows(Tensor[] rows, str[] codes, Tensor?[] statistics) -> Tensor", _encode_rows, _like_encoded_rows)
_define(
    "decode_rows(Tensor message, str[] codes, int[] dims, Tensor?[] statistics, ScalarType dtype) -> Tensor[]",
    _decode_rows,
    _like_decoded_rows,
)
_define("column_statistics(Tensor[] tensors, str[] kinds) -> Tensor", _column_statistics, _like_statistics)
_define("merge_statistics(Tensor gathered, str[] kinds) -> Tensor[]", _merge_statistics, _like_merged_statistics)
_define(
    "encode_residual(Tensor values, Tensor base, Tensor channel_scale, Tensor token_scale) -> (Tensor, Tensor)",
    _encode_residual,
    _like_residual,
)
_define(
    "decode_residual(Tensor message, Tensor base) -> Tensor", _decode_residual, lambda _, base: torch.empty_like(base)
)
