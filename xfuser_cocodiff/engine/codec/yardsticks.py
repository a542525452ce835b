"""Yardsticks: errors of FP8 and FP4, in which other systems compute and send, on the same tensors."""

import torch

from xfuser_cocodiff.engine.codec.torch_kernels import energy

FP8, FP4 = YARDSTICKS = ("fp8", "fp4")
_FP8 = torch.float8_e4m3fn
_FP8_LARGEST, _FP8_SMALLEST = torch.finfo(_FP8).max, 2**-9
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Scale of zeros, so that none is divided by zero."""
_FP4_BLOCK, _FP4_LARGEST = 16, 6.0
_FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between the magnitudes of FP4 (e2m1)."""
_SAMPLED_ROWS = 1024
"""Rows of a tensor that are enough for its error."""


def measure(values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the energies of error and values of each yardstick on values (..., D), estimated from some rows.

    Returns:
        float32 (2) for each.
    """
    if not values.numel():
        return {}
    rows = values.flatten(0, -2)
    rows = rows[:: max(1, len(rows) // _SAMPLED_ROWS)].float()
    found = {FP8: round_to_fp8(rows)}
    if rows.shape[-1] % _FP4_BLOCK == 0:
        found[FP4] = round_to_fp4(rows)
    return {name: torch.stack([energy(rounded - rows), energy(rows)]) for name, rounded in found.items()}


def round_to_fp8(rows: torch.Tensor) -> torch.Tensor:
    """Return float32 rows (..., D) rounded to FP8 (e4m3) with a scale of each row."""
    scale = (rows.abs().amax(-1, keepdim=True) / _FP8_LARGEST).clamp(min=_SMALLEST_SCALE)
    return (rows / scale).clamp(-_FP8_LARGEST, _FP8_LARGEST).to(_FP8).float() * scale


def round_to_fp4(rows: torch.Tensor) -> torch.Tensor:
    """Return float32 rows (..., D), D divisible by 16, rounded to NVFP4.

    That is FP4 (e2m1) with an FP8 (e4m3) scale of 16 values and a float32 scale of the tensor. Without the latter,
    scales of small values would have few bits in FP8, or be zero.
    """
    tensor_scale = (rows.abs().amax() / (_FP8_LARGEST * _FP4_LARGEST)).clamp(min=_SMALLEST_SCALE)
    blocks = (rows / tensor_scale).unflatten(-1, (-1, _FP4_BLOCK))
    scale = (blocks.abs().amax(-1, keepdim=True) / _FP4_LARGEST).clamp(_FP8_SMALLEST, _FP8_LARGEST).to(_FP8).float()
    scaled = blocks / scale
    magnitudes, thresholds = rows.new_tensor(_FP4_MAGNITUDES), rows.new_tensor(_FP4_THRESHOLDS)
    return (magnitudes[torch.bucketize(scaled.abs(), thresholds)].copysign(scaled) * scale).flatten(-2) * tensor_scale
