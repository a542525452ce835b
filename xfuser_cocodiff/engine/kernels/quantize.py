"""Quantizers: packed low-bit residuals, and int8 link references.

:func:`quantize` uses uniform levels whose width follows the root mean square of a row, or a fraction of its maximum
where that is larger, so that outliers are clipped less. With 4 and 8 bits it follows the maximum, so that none is
clipped; fewer levels would be too wide for that. Encoder and decoder compute decoded values by the same operations: the
encoder knows the receiver's values bit for bit.

:func:`channel_scales` finds channels whose maximum over all tokens is larger than that of others. One of them would set
the width of the levels for a whole row, so residuals are divided by these scales.

:func:`to_int8` quantizes link references. Both ends of a link run it and :func:`channel_scales`, perhaps on devices
whose logarithms, roots and sums differ in the last bit, and must get the same result. They therefore use only
operations that IEEE 754 rounds identically everywhere: comparisons, single products and quotients, and integers.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch


class Grid(NamedTuple):
    """Uniform quantization levels, symmetric around zero."""

    levels: int
    """Number of levels."""
    per_byte: int
    """Number of values in a byte, stored as the digits of a number in base `levels`."""
    width: float
    """Width of a level, in root mean squares of a row."""

    @property
    def by_maximum(self) -> bool:
        """Whether scales follow the row's maximum, which takes the outermost level, instead of its root mean square."""
        return self.levels >= 16

    @property
    def is_across_rows(self) -> bool:
        """Whether the values of a byte are those of adjacent rows in one column, not of adjacent columns.

        Three or five columns a byte would leave gaps where kernels process columns by powers of two.
        """
        return 8 % self.per_byte > 0

    @property
    def reach(self) -> float:
        """Outer edge of the outermost level, in root mean squares."""
        return self.width * self.levels / 2


GRIDS = {
    1: Grid(2, 8, 1.596),
    1.6: Grid(3, 5, 1.1 * 1.224),
    2: Grid(4, 4, 1.1 * 0.9957),
    2.7: Grid(6, 3, 1.1 * 0.7334),
    4: Grid(16, 2, 0.3352),
    8: Grid(256, 1, 0.03087),
}
"""Grids by bits per value. Widths minimize the squared error for a normal distribution (J. Max, "Quantizing for minimum
distortion", 1960, table II). Residuals between steps have heavier tails, so coarse grids use 10% wider levels."""
PEAK_SHARE = 0.4
"""Minimum scale of a row as a fraction of its maximum, where scales follow the root mean square. With less, and with
0.6, pictures are farther from lossless ones."""
LARGE_CHANNEL, _MAX_RATIO = 4.0, 2.0**20
"""Minimum ratio to the median channel for a scale, and its upper limit. The full ratio, or scales for smaller channels,
lose PSNR where large channels matter as much as others."""
_EXPONENT_OF_ONE, _MANTISSA_BITS = 127, 23
"""Exponent of 1 in a float32, and the number of bits below the exponent."""
ROW = 64
"""Minimum number of values that share a scale; smaller heads combine several tokens in a row, if T allows it."""
PER_OCTAVE, ORIGIN = 6, 168
"""Encoding of scales, one byte each: six steps per octave from 2**-27.8 to 2**14.3. Root mean squares take the nearest
step, maxima the next above."""
_ZERO, NOT_FINITE = 0, 255
_INT8_LOWEST_OCTAVE, _INT8_MAX = 26, 127
"""Encoding of int8 references: row maxima range from about 2**-26 to 2**16.3, beyond float16's largest value, and the
row's maximum takes level 127."""


@functools.cache
def tokens_per_row(bits: float, dim: int, tokens: int, sends_all: bool) -> int:
    """Return how many tokens of a head share a scale.

    With 8 bits, or if only active tokens are sent, each token has its own scale: its decoded value then depends on no
    other token.

    Args:
        bits: bits per value, one of GRIDS.
        dim: head dim.
        tokens: number of tokens in a group.
        sends_all: whether all tokens are sent.
    """
    return math.gcd(max(1, ROW // dim), tokens) if sends_all and bits < 8 else 1


def level_bytes(bits: float, rows: int, size: int) -> int:
    """Return the bytes that the packed levels of a link's rows of `size` values take.

    The last byte of a row, or of a column of all rows, has zeros for values that there are not.
    """
    grid = GRIDS[bits]
    return -(-rows // grid.per_byte) * size if grid.is_across_rows else rows * -(-size // grid.per_byte)


def quantize(values: torch.Tensor, bits: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize the rows of each link.

    Args:
        values: (..., rows, D), floating point.
        bits: bits per value, one of GRIDS.

    Returns:
        Packed levels, uint8 (..., :func:`level_bytes`); scales, uint8 (..., rows, 1); and the decoded values as
        :func:`dequantize` returns them. A row with a value that is not finite has the scale NOT_FINITE.
    """
    grid, values = GRIDS[bits], values.float()
    if grid.by_maximum:
        scales = _encode_scale(values.abs().amax(-1, keepdim=True).div_(grid.reach), torch.ceil)
    else:
        norms = torch.linalg.vector_norm(values, dim=-1, keepdim=True)  # one pass over the values, a mean takes two
        least = values.abs().amax(-1, keepdim=True).mul_(PEAK_SHARE)
        scales = _encode_scale(norms.mul_(values.shape[-1] ** -0.5).maximum(least), torch.round)
    width = grid.width * _decode_scale(scales)
    levels = values.div(width)
    if grid.levels % 2:
        levels.add_(0.5)
    levels.floor_().nan_to_num_(0.0).add_(grid.levels // 2).clamp_(0, grid.levels - 1)
    return _pack(levels, grid), scales, levels.sub_((grid.levels - 1) / 2).mul_(width)


def dequantize(packed: torch.Tensor, scales: torch.Tensor, bits: float, size: int) -> torch.Tensor:
    """Return the values of packed levels and scales, float32 (..., rows, size); NaN in rows that were not finite.

    Args:
        packed: packed levels, uint8 (..., :func:`level_bytes`).
        scales: uint8 (..., rows, 1).
        bits: bits per value, one of GRIDS.
        size: number of values in a row.
    """
    grid, rows = GRIDS[bits], scales.shape[-2]
    digits = _digits(grid, packed.device).index_select(0, packed.flatten().int())
    if grid.is_across_rows:
        values = digits.view(*packed.shape[:-1], -1, size, grid.per_byte).transpose(-1, -2).flatten(-3, -2)
    else:
        values = digits.view(*packed.shape[:-1], rows, -(-size // grid.per_byte) * grid.per_byte)
    return values[..., :rows, :size] * (grid.width * _decode_scale(scales))


def channel_scales(values: torch.Tensor) -> torch.Tensor:
    """Return the scales of channels, bit-identical on every device.

    A scale is the square root of a channel's maximum over the median channel's, rounded to a power of two, or 1 if the
    ratio is less than LARGE_CHANNEL.

    Args:
        values: (L, G, H, T, D); a channel that is not finite has a scale of 1.

    Returns:
        float32 (L, H, D).
    """
    if not values.numel():
        return torch.ones(len(values), values.shape[2], values.shape[4], device=values.device)
    # One dim after the other: on CPUs PyTorch takes ten times as long for two at once.
    largest = torch.maximum(values.amax(3).amax(1), values.amin(3).amin(1).neg_()).float()
    usual = largest.sort(-1).values[..., (largest.shape[-1] - 1) // 2, None]
    ratio = (largest / usual).nan_to_num_(1.0, 1.0).clamp_(1.0, _MAX_RATIO)  # 1 in a head of zeros
    octaves = (ratio.view(torch.int32) >> _MANTISSA_BITS) - _EXPONENT_OF_ONE
    return powers_of(((octaves + 1) >> 1).where(ratio >= LARGE_CHANNEL, 0))


def exponents_of(scales: torch.Tensor) -> torch.Tensor:
    """Return the exponents of scales of channels as bytes, uint8."""
    return ((scales.view(torch.int32) >> _MANTISSA_BITS) - _EXPONENT_OF_ONE).to(torch.uint8)


def powers_of(exponents: torch.Tensor) -> torch.Tensor:
    """Return the scales of channels, float32; the inverse of :func:`exponents_of`."""
    return ((exponents.int() + _EXPONENT_OF_ONE) << _MANTISSA_BITS).view(torch.float32)


def to_int8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to int8, with the same result on every device.

    Args:
        values: (..., D), floating point.

    Returns:
        Levels, int8 (..., D), and the code of each row's maximum, uint8 (..., 1).
    """
    maxima, _, inverses = _int8_tables(values.device)
    largest = values.abs().amax(-1, keepdim=True).float()
    code = torch.bucketize(largest, maxima).clamp_(max=NOT_FINITE - 1)  # the smallest maximum that is not below
    code = torch.where(largest.isfinite(), code, NOT_FINITE)
    # Levels of rows that are not finite do not matter: their width decodes to NaN.
    levels = (values * inverses[code]).round_().nan_to_num_(0.0).clamp_(-_INT8_MAX, _INT8_MAX)
    return levels.to(torch.int8), code.to(torch.uint8)


def from_int8(levels: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the values of :func:`to_int8`'s levels and codes, float32; NaN in rows that were not finite."""
    return levels * _int8_tables(codes.device)[1][codes.int()]


@functools.cache
def _int8_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three tables over the 256 codes: row maximum, level width and inverse level width, float32 (256)."""
    maxima = [0.0, *(2.0 ** (code / PER_OCTAVE - _INT8_LOWEST_OCTAVE) for code in range(1, NOT_FINITE))]
    widths = [maximum / _INT8_MAX for maximum in maxima]
    inverses = [1 / width if width else 0.0 for width in widths]
    tables = maxima, [*widths, math.nan], [*inverses, 0.0]
    return tuple(torch.tensor(table, dtype=torch.float32, device=device) for table in tables)


def _encode_scale(scale: torch.Tensor, round_code: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the codes of scales, uint8, rounded by the given function."""
    code = round_code(scale.log2().mul_(PER_OCTAVE)).add_(ORIGIN)
    # The clamp maps a row of zeros, whose logarithm is -inf, to the code of zero.
    code = torch.where(scale.isfinite(), code.clamp_(_ZERO, NOT_FINITE - 1), float(NOT_FINITE))
    return code.to(torch.uint8)


def _decode_scale(code: torch.Tensor) -> torch.Tensor:
    """Return the scales of codes, float32."""
    return scale_table(code.device)[code.int()]


@functools.cache
def scale_table(device: torch.device) -> torch.Tensor:
    """Return the scale of each code, float32 (256). A table, since exponentials round differently between devices."""
    table = [2.0 ** ((code - ORIGIN) / PER_OCTAVE) for code in range(256)]
    table[_ZERO], table[NOT_FINITE] = 0.0, float("nan")
    return torch.tensor(table, dtype=torch.float32, device=device)


def _pack(levels: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Pack levels (..., rows, D), integers in float32, into bytes; the first level of a byte is its lowest digit."""
    dim = -2 if grid.is_across_rows else -1
    if missing := -levels.shape[dim] % grid.per_byte:
        levels = torch.nn.functional.pad(levels, (0, 0, 0, missing) if grid.is_across_rows else (0, missing))
    groups, weights = levels.unflatten(dim, (-1, grid.per_byte)), _weights(grid, levels.device)
    packed = weights @ groups if grid.is_across_rows else groups @ weights  # exact: integers below 2**24
    return packed.to(torch.uint8).flatten(-2)


@functools.cache  # created once, since copying it to a device blocks the host
def _weights(grid: Grid, device: torch.device) -> torch.Tensor:
    """Return the weight of each digit in a byte, float32 (per_byte)."""
    weights = [float(grid.levels**digit) for digit in range(grid.per_byte)]
    return torch.tensor(weights, dtype=torch.float32, device=device)


@functools.cache
def _digits(grid: Grid, device: torch.device) -> torch.Tensor:
    """Return the levels that each byte holds, relative to the middle of the grid, float32 (256, per_byte)."""
    table = [[byte // grid.levels**digit % grid.levels for digit in range(grid.per_byte)] for byte in range(256)]
    return torch.tensor(table, dtype=torch.float32, device=device) - (grid.levels - 1) / 2
