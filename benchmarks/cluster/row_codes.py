"""Stateless codes of other systems: how they quantize a row, one token of one head, before an all-to-all.

Sizes in shapes: D values of a row, n bytes of its code.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
FP8_LARGEST = torch.finfo(FP8).max
_SMALLEST_SCALE = 1e-6 / FP8_LARGEST
"""Scale of rows of zeros: cache-dit clamps the largest value of a row to 1e-6."""
_INT8_LARGEST = 127
_FP4_BLOCK = 16
"""Values that share a scale in NVFP4, the format of SageAttention3."""
_FP4_LARGEST = 6.0
_FP4_THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between the magnitudes of FP4 (e2m1): 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
_FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SMALLEST_FP8 = 2**-9
"""Smallest positive FP8 number: a block scale of zero could not be divided by."""


@dataclass(frozen=True)
class RowCode:
    """Code of one row. Encoding and decoding are exact functions of the row and of a statistic of its tensor."""

    name: str
    row_bytes: Callable[[int], int]
    """Bytes of an encoded row, given D."""
    encode: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    """Returns uint8 (..., n) for float32 rows (..., D) and the statistic."""
    decode: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    """Returns float32 rows (..., D) for uint8 (..., n) and the statistic."""

    def round_trip(self, rows: torch.Tensor, statistic: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows (..., D) as their receiver decodes them, in their dtype."""
        return self.decode(self.encode(rows.float(), statistic), statistic).to(rows.dtype)


def _scaled_fp8(scale_dtype: torch.dtype) -> tuple[Callable, Callable]:
    """Return the functions of FP8 with a scale of each row, which follows its values."""
    size = scale_dtype.itemsize

    def encode(rows: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        scale = (rows.abs().amax(-1, keepdim=True) / FP8_LARGEST).clamp(min=_SMALLEST_SCALE).to(scale_dtype)
        values = (rows / scale.float()).clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8)
        return torch.cat([values.view(torch.uint8), scale.view(torch.uint8)], -1)

    def decode(payload: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        values, scale = payload[..., :-size], payload[..., -size:]
        return values.contiguous().view(FP8).float() * scale.contiguous().view(scale_dtype).float()

    return encode, decode


def _encode_static_fp8(rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    scaled = rows if scale is None else rows / scale
    return scaled.clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8).view(torch.uint8)


def _decode_static_fp8(payload: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    values = payload.contiguous().view(FP8).float()
    return values if scale is None else values * scale


def _encode_int8(rows: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    rows = rows if shift is None else rows - shift
    scale = rows.abs().amax(-1, keepdim=True) / _INT8_LARGEST
    scale = torch.where(scale > 0, scale, 1.0)
    values = (rows / scale).round().clamp(-_INT8_LARGEST, _INT8_LARGEST).to(torch.int8)
    return torch.cat([values.view(torch.uint8), scale.view(torch.uint8)], -1)


def _decode_int8(payload: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    values, scale = payload[..., :-4].contiguous().view(torch.int8), payload[..., -4:].contiguous()
    rows = values.float() * scale.view(torch.float32)
    return rows if shift is None else rows + shift


def _encode_fp4(rows: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    blocks = rows.unflatten(-1, (-1, _FP4_BLOCK))
    scale = (blocks.abs().amax(-1, keepdim=True) / _FP4_LARGEST).clamp(_SMALLEST_FP8, FP8_LARGEST).to(FP8)
    scaled = (blocks / scale.float()).contiguous()
    index = torch.bucketize(scaled.abs(), scaled.new_tensor(_FP4_THRESHOLDS)).to(torch.uint8)
    codes = (index | ((scaled < 0).to(torch.uint8) << 3)).flatten(-2).unflatten(-1, (-1, 2))
    return torch.cat([codes[..., 0] | codes[..., 1] << 4, scale.view(torch.uint8).flatten(-2)], -1)


def _decode_fp4(payload: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    split = payload.shape[-1] * 8 // 9
    pairs, scale = payload[..., :split], payload[..., split:].contiguous().view(FP8).float()
    codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
    magnitude = scale.new_tensor(_FP4_MAGNITUDES)[(codes & 7).long()]
    values = torch.where(codes > 7, -magnitude, magnitude)
    return (values.unflatten(-1, (-1, _FP4_BLOCK)) * scale[..., None]).flatten(-2)


STATIC_FP8 = RowCode("fp8", lambda dim: dim, _encode_static_fp8, _decode_static_fp8)
"""FP8 with scales that both ends know, the statistic; without one, the scale is 1."""
ROW_FP8 = RowCode("row-fp8", lambda dim: dim + 4, *_scaled_fp8(torch.float32))
"""FP8 with a float32 scale of each row: Q and V in cache-dit."""
ROW_FP8_HALF = RowCode("row-fp8-half", lambda dim: dim + 2, *_scaled_fp8(torch.bfloat16))
"""FP8 with a bfloat16 scale of each row: O in cache-dit."""
FP4 = RowCode("fp4", lambda dim: dim // 2 + dim // _FP4_BLOCK, _encode_fp4, _decode_fp4)
"""FP4 (e2m1) with an FP8 scale of 16 values each. D must be divisible by 16."""
INT8 = RowCode("int8", lambda dim: dim + 4, _encode_int8, _decode_int8)
"""INT8 with a float32 scale of each row, around the statistic."""
CODES = {code.name: code for code in (STATIC_FP8, ROW_FP8, ROW_FP8_HALF, FP4, INT8)}
