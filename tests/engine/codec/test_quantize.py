"""The quantizers, against slow ones that process one value at a time."""

import math

import numpy as np
import pytest
import torch

from xfuser_cocodiff.engine.codec.quantize import (
    GRIDS,
    dequantize,
    from_int8,
    level_bytes,
    quantize,
    to_int8,
)

BITS = sorted(GRIDS)


def quantized_slowly(row: list[float], bits: float) -> list[float]:
    """Return a row's decoded values: the middle of the nearest level of a uniform grid around zero."""
    levels, width = GRIDS[bits].levels, GRIDS[bits].width
    if bits >= 4:  # the maximum lies at the grid's outer edge
        code = math.floor(6 * math.log2(max(map(abs, row)) / (levels / 2 * width)) + 1) if any(row) else 0
    else:
        scale = max(math.sqrt(sum(value * value for value in row) / len(row)), 0.4 * max(map(abs, row)))
        code = round(6 * math.log2(scale)) if any(row) else 0
    width *= 2 ** (code / 6)
    middles = [(level - (levels - 1) / 2) * width for level in range(levels)] if any(row) else [0.0]
    return [min(middles, key=lambda middle: (abs(value - middle), -middle)) for value in row]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize_takes_the_nearest_level(bits: float, dtype: torch.dtype) -> None:
    values = torch.randn(5, 3, 24, generator=torch.Generator().manual_seed(int(10 * bits))).mul(0.3).to(dtype)
    values[1, 1] = 0
    values[2] *= 1e-3
    packed, scales, decoded = quantize(values, bits)
    assert (packed.shape, scales.shape) == ((5, level_bytes(bits, 3, 24)), (5, 3, 1))
    found = dequantize(packed, scales, bits, 24).reshape(-1, 24)
    assert torch.equal(decoded.reshape(-1, 24), found)
    for row, expected in zip(found, values.float().view(-1, 24), strict=True):
        torch.testing.assert_close(row, torch.tensor(quantized_slowly(expected.tolist(), bits)), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("size", [1e-12, 1e-30, 1e12])
def test_scales_out_of_range_decode_to_finite_values(size: float) -> None:
    """Decode rows beyond the range of scales to wrong but finite values."""
    found = dequantize(*quantize(torch.full((1, 8), size), 8)[:2], 8, 8)
    assert found.isfinite().all() and (found >= 0).all()


def int8_slowly(row: np.ndarray) -> np.ndarray:
    """Return a row's int8 values: levels of the smallest table maximum, six per octave, not below the row's."""
    maxima = [0.0, *(np.float32(2.0 ** (code / 6 - 26)) for code in range(1, 255))]
    maximum = next((each for each in maxima if each >= np.abs(row).max()), maxima[-1])
    if maximum == 0:
        return np.zeros_like(row)
    levels = np.floor(np.float32(0.5) + row * np.float32(1 / (2.0 ** ((maxima.index(maximum)) / 6 - 26) / 127)))
    return levels.clip(-127, 127) * np.float32(2.0 ** (maxima.index(maximum) / 6 - 26) / 127)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_int8_references_follow_row_maxima(dtype: torch.dtype) -> None:
    values = torch.randn(60, 24, generator=torch.Generator().manual_seed(1))
    values = (values * torch.logspace(-9, 4, 60)[:, None]).to(dtype).float()
    values[3], values[4] = 0, 2.0**-2
    levels, codes = to_int8(values)
    assert (levels.dtype, codes.dtype, codes.shape) == (torch.int8, torch.uint8, (60,))
    for row, expected in zip(from_int8(levels, codes), values, strict=True):
        np.testing.assert_array_equal(row.numpy(), int8_slowly(expected.numpy()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_int8_references_out_of_range_are_finite(bad: float) -> None:
    values = torch.tensor([[1e-30, 1e-12], [1e30, -1e38], [65504.0, 1.0], [bad, 1.0]])
    found = from_int8(*to_int8(values))
    assert found[:3].isfinite().all() and found[3].isnan().all()
    torch.testing.assert_close(found[2, 0].item(), 65504.0, rtol=1e-2, atol=0)
