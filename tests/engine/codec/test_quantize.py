"""The quantizers, against slow ones that process one value at a time."""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize(
    ("bits", "per_unit"), [(1, 16), (1.6, 10), (2, 8), (2.7, 6), (3.2, 5), (4, 4), (5.3, 3), (8, 2)]
)
@pytest.mark.parametrize("rows", [1, 7, 30])
def test_two_bytes_have_the_levels_of_adjacent_rows(bits: float, per_unit: int, rows: int) -> None:
    """The levels of missing rows count as 0."""
    grid = GRIDS[bits]
    values = torch.randn(2, rows, 24, generator=torch.Generator().manual_seed(rows))
    packed, scales, decoded = quantize(values, bits)
    assert packed.shape[1] == level_bytes(bits, rows, 24) == 2 * 24 * math.ceil(rows / per_unit)
    widths = grid.width * 2 ** ((scales.int() - 168) / 6)
    levels = (decoded / widths + (grid.levels - 1) / 2).round().int()
    for link in range(2):
        pairs = packed[link].tolist()
        for number, unit in enumerate(low + 256 * high for low, high in zip(pairs[::2], pairs[1::2], strict=True)):
            first, column = number // 24 * per_unit, number % 24
            digits = levels[link, first : first + per_unit, column].tolist()
            assert unit == sum(digit * grid.levels**place for place, digit in enumerate(digits))


@pytest.mark.parametrize(
    ("bits", "decibels"), [(1, 4.40), (1.6, 7.21), (2, 9.25), (2.7, 12.18), (3.2, 15.13), (4, 19.38), (8, 40.34)]
)
def test_normal_distribution_has_the_snr_of_theory(bits: float, decibels: float) -> None:
    """Compare with uniform levels of J. Max, 1960, table II.

    Scale steps of a sixth of an octave, and levels that are wider than optimal for this distribution, cost a little, as
    do scales that follow outliers, here of 128 values. With 8 bits the maximum of a row is below that of all values,
    which helps.
    """
    values = torch.randn(2000, 128, generator=torch.Generator().manual_seed(0))
    error = values - dequantize(*quantize(values, bits)[:2], bits, 128)
    found = 10 * math.log10(values.square().mean() / error.square().mean())
    price_of_outliers = 0.5 if bits in (1.6, 2, 2.7, 3.2) else 0.0
    assert decibels - 0.5 - price_of_outliers < found < decibels + 0.5 or (bits == 8 and found > decibels)


@pytest.mark.parametrize(("bits", "half_a_level"), [(4, 0.071), (8, 0.0045)])
def test_4_and_8_bits_do_not_clip_outliers(bits: int, half_a_level: float) -> None:
    values = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    values[:, 7] = 300.0
    found = dequantize(*quantize(values, bits)[:2], bits, 64)
    torch.testing.assert_close(found[:, 7], values[:, 7], rtol=half_a_level, atol=0)


@pytest.mark.parametrize(("bits", "least", "most"), [(1.6, 0.45, 0.65), (2, 0.6, 0.75), (2.7, 0.7, 0.9)])
def test_fewer_bits_clip_outliers_to_a_share(bits: float, least: float, most: float) -> None:
    """By the root mean square, this outlier would decode to a fifth of itself."""
    values = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    values[:, 7] = 300.0
    found = dequantize(*quantize(values, bits)[:2], bits, 64)[:, 7] / 300
    assert (found > least).all() and (found < most).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_values_affect_their_row_only(bits: int, bad: float) -> None:
    values = torch.randn(4, 16)
    expected = dequantize(*quantize(values, bits)[:2], bits, 16)
    values[2, 5] = bad
    found = dequantize(*quantize(values, bits)[:2], bits, 16)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])


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


class Operations(TorchDispatchMode):
    """Records the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__.split(".")[0].rstrip("_"))
        return func(*args, **(kwargs or {}))


def test_int8_references_are_equal_on_every_device() -> None:
    """Use no operation whose last bit depends on the device or on the order of a sum, since both ends compute it."""
    to_int8(torch.randn(3, 8))  # creates the tables
    with Operations() as used:
        from_int8(*to_int8(torch.randn(3, 8)))
    exact = {
        "abs",
        "amax",
        "bucketize",
        "clamp",
        "eq",
        "ne",
        "lt",
        "gt",
        "mul",
        "add",
        "sub",
        "floor",
        "nan_to_num",
        "index",
    }
    exact |= {"bitwise_and", "bitwise_not", "logical_not", "masked_fill", "__rshift", "__and__", "where"}
    moves = {"randn", "detach", "lift_fresh", "_to_copy", "scalar_tensor", "view", "unsqueeze"}
    assert used.names - moves <= exact
