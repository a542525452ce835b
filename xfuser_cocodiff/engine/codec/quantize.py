"""Quantizers: packed low-bit residuals, and int8 link references.

:func:`quantize` uses uniform levels whose width follows the root mean square of a row. Where a fraction of the maximum
is larger, it follows that, so that outliers are clipped less. From 16 levels on it follows the maximum, so that none is
clipped; fewer levels would be too wide for that. Encoder and decoder compute decoded values by the same operations: the
encoder knows the receiver's values bit for bit.

:func:`to_int8` quantizes link references. Both ends of a link run it, perhaps on devices whose logarithms, roots and
sums differ in the last bit, and must get the same result. It therefore uses only operations that IEEE 754 rounds
identically everywhere: comparisons, single products and quotients, and integers.
"""

import functools
import math
from typing import NamedTuple

import torch


class Grid(NamedTuple):
    """Uniform quantization levels, symmetric around zero."""

    levels: int
    """Number of levels."""
    per_unit: int
    """Number of values in two bytes, stored as the digits of a number in base `levels`."""
    width: float
    """Width of a level, in root mean squares of a row."""
    distortion: float
    """Norm of the error over the norm of the values, for rows of 64 normal values."""

    @property
    def by_maximum(self) -> bool:
        """Whether scales follow the row's maximum, which takes the outermost level, instead of its root mean square."""
        return self.levels >= 16

    @property
    def reach(self) -> float:
        """Outer edge of the outermost level, in root mean squares."""
        return self.width * self.levels / 2


GRIDS = {
    1: Grid(2, 16, 1.596, 0.61),
    1.6: Grid(3, 10, 1.1 * 1.224, 0.45),
    2: Grid(4, 8, 1.1 * 0.9957, 0.36),
    2.7: Grid(6, 6, 1.1 * 0.7334, 0.26),
    3.2: Grid(9, 5, 1.1 * 0.5338, 0.18),
    4: Grid(16, 4, 0.3352, 0.10),
    5.3: Grid(40, 3, 0.1479, 0.04),
    8: Grid(256, 2, 0.03087, 0.006),
}
"""Grids by bits per value. Widths minimize the squared error for a normal distribution (J. Max, "Quantizing for minimum
distortion", 1960, table II). Residuals between steps have heavier tails, so coarse grids use 10% wider levels."""
UNIT_BYTES = 2
"""Bytes of a unit, which has one value of each of `per_unit` adjacent rows, all in one column."""
PEAK_SHARE = 0.4
"""Minimum scale of a row as a fraction of its maximum, where scales follow the root mean square. Without it errors are
about the same, but images of small models have 1 to 2 dB less PSNR to lossless ones."""
_EXPONENT_OF_ONE, _MANTISSA_BITS = 127, 23
"""Exponent of 1 in a float32, and the number of bits below the exponent."""
ROW = 64
"""Minimum number of values that share a scale; smaller heads combine several tokens in a row, if T allows it."""
PER_OCTAVE, ORIGIN = 6, 168
"""Encoding of scales, one byte each: six steps per octave from 2**-27.8 to 2**14.3. Root mean squares take the nearest
step, maxima the next above."""
_ZERO, NOT_FINITE = 0, 255
INT8_LOWEST_OCTAVE, _INT8_MAX = 26, 127
"""Encoding of int8 references: row maxima range from about 2**-26 to 2**16.3, beyond float16's largest value, and the
row's maximum takes level 127."""
INT8_THRESHOLDS = tuple(round(2**_MANTISSA_BITS * (2 ** (step / PER_OCTAVE) - 1)) for step in range(PER_OCTAVE))
"""Mantissas of the maxima within an octave."""
_INT8_WIDTHS = (0.0, *(2.0 ** (code / PER_OCTAVE - INT8_LOWEST_OCTAVE) / _INT8_MAX for code in range(1, NOT_FINITE)))


@functools.cache
def tokens_per_row(dim: int, tokens: int) -> int:
    """Return how many of a head's tokens, each of `dim` values, are one row."""
    return math.gcd(max(1, ROW // dim), tokens)


def level_bytes(bits: float, rows: int, size: int) -> int:
    """Return the bytes that the packed levels of a link's rows of `size` values take.

    The last unit of a column has zeros for rows that there are not.
    """
    return UNIT_BYTES * -(-rows // GRIDS[bits].per_unit) * size


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
    largest = values.abs().amax(-1, keepdim=True)
    if grid.by_maximum:
        scale, rounding = largest / grid.reach, 1.0  # up, so that no value is clipped
    else:
        norms = torch.linalg.vector_norm(values, dim=-1, keepdim=True)  # one pass over the values, a mean takes two
        scale, rounding = norms.mul_(values.shape[-1] ** -0.5).maximum(largest.mul_(PEAK_SHARE)), 0.5
    scales = _encode_scale(scale, rounding)
    width = grid.width * scale_table(scales.device)[scales.int()]
    inverse = torch.where(width > 0, 1 / width, 0.0)
    levels = values.mul(inverse).add_(grid.levels / 2).floor_().nan_to_num_(0.0).clamp_(0, grid.levels - 1)
    return _pack(levels, grid), scales, levels.sub_((grid.levels - 1) / 2).mul_(width)


def dequantize(packed: torch.Tensor, scales: torch.Tensor, bits: float, size: int) -> torch.Tensor:
    """Return the values of packed levels and scales, float32 (..., rows, size); NaN in rows that were not finite.

    Args:
        packed: packed levels, uint8 (..., :func:`level_bytes`).
        scales: uint8 (..., rows, 1).
        bits: bits per value, one of GRIDS.
        size: number of values in a row.
    """
    grid = GRIDS[bits]
    units = packed.contiguous().view(torch.int16).int().bitwise_and_(0xFFFF)
    digits = _digits(grid, packed.device).index_select(0, units.flatten())
    values = digits.view(*packed.shape[:-1], -1, size, grid.per_unit).transpose(-1, -2).flatten(-3, -2)
    return values[..., : scales.shape[-2], :] * (grid.width * scale_table(scales.device)[scales.int()])


def to_int8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to int8, with the same result on every device.

    Args:
        values: float32 (..., D).

    Returns:
        Levels, int8 (..., D), and the code of each row's maximum, uint8 (...); both are contiguous.
    """
    largest = values.abs().amax(-1)
    bits = largest.view(torch.int32)
    exponent, mantissa = (bits >> _MANTISSA_BITS) - _EXPONENT_OF_ONE, bits & (2**_MANTISSA_BITS - 1)
    code = PER_OCTAVE * (exponent + INT8_LOWEST_OCTAVE)  # of the smallest maximum that is not below
    code = code + torch.bucketize(mantissa, _int8_thresholds(values.device))
    code = code.clamp_(1, NOT_FINITE - 1).masked_fill_(largest == 0, 0).masked_fill_(~largest.isfinite(), NOT_FINITE)
    # Levels of rows that are not finite do not matter: their width decodes to NaN.
    inverse = int8_inverses(values.device)[code, None]
    levels = values.mul(inverse).add_(0.5).floor_().nan_to_num_(0.0).clamp_(-_INT8_MAX, _INT8_MAX)
    return levels.to(torch.int8).contiguous(), code.to(torch.uint8).contiguous()


def from_int8(levels: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the values of :func:`to_int8`'s levels and codes, float32; NaN in rows that were not finite."""
    return levels * int8_widths(codes.device)[codes.int(), None]


@functools.cache  # created once, since copying it to a device blocks the host
def _int8_thresholds(device: torch.device) -> torch.Tensor:
    return torch.tensor(INT8_THRESHOLDS, dtype=torch.int32, device=device)


@functools.cache
def int8_widths(device: torch.device) -> torch.Tensor:
    """Return the width of the levels of each code of int8 rows, float32 (256)."""
    return torch.tensor([*_INT8_WIDTHS, math.nan], dtype=torch.float32, device=device)


@functools.cache
def int8_inverses(device: torch.device) -> torch.Tensor:
    """Return the inverse of :func:`int8_widths`, float32 (256); 0 for rows of zeros and those that are not finite."""
    inverses = [*(1 / width if width else 0.0 for width in _INT8_WIDTHS), 0.0]
    return torch.tensor(inverses, dtype=torch.float32, device=device)


def _encode_scale(scale: torch.Tensor, rounding: float) -> torch.Tensor:
    """Return the codes of scales, uint8: of the nearest one for a rounding of 0.5, of one above for 1."""
    code = scale.log2().mul_(PER_OCTAVE).add_(ORIGIN + rounding).floor_()
    # The clamp maps a row of zeros, whose logarithm is -inf, to the code of zero.
    code = torch.where(scale.isfinite(), code.clamp_(_ZERO, NOT_FINITE - 1), float(NOT_FINITE))
    return code.to(torch.uint8)


@functools.cache
def scale_table(device: torch.device) -> torch.Tensor:
    """Return the scale of each code, float32 (256). A table, since exponentials round differently between devices."""
    table = [2.0 ** ((code - ORIGIN) / PER_OCTAVE) for code in range(256)]
    table[_ZERO], table[NOT_FINITE] = 0.0, float("nan")
    return torch.tensor(table, dtype=torch.float32, device=device)


def _pack(levels: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Pack levels (..., rows, D), integers in float32, into units; the first row of a unit is its lowest digit."""
    if missing := -levels.shape[-2] % grid.per_unit:
        levels = torch.nn.functional.pad(levels, (0, 0, 0, missing))
    units = _weights(grid, levels.device) @ levels.unflatten(-2, (-1, grid.per_unit))  # exact: integers below 2**24
    return units.to(torch.int32).to(torch.int16).flatten(-2).view(torch.uint8)


@functools.cache  # created once, since copying it to a device blocks the host
def _weights(grid: Grid, device: torch.device) -> torch.Tensor:
    """Return the weight of each digit in a unit, float32 (per_unit)."""
    weights = [float(grid.levels**digit) for digit in range(grid.per_unit)]
    return torch.tensor(weights, dtype=torch.float32, device=device)


@functools.cache
def _digits(grid: Grid, device: torch.device) -> torch.Tensor:
    """Return the levels that each unit holds, relative to the middle of the grid, float32 (65536, per_unit)."""
    units = torch.arange(2 ** (8 * UNIT_BYTES))[:, None]
    digits = units // grid.levels ** torch.arange(grid.per_unit) % grid.levels
    return (digits - (grid.levels - 1) / 2).to(device, torch.float32)
