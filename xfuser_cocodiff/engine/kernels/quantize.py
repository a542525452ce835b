"""Values in a few bits: uniform levels, as far apart as the root mean square of a row asks for; in 8 bits, its maximum,
so that no outlier is cut off.

Encoder and decoder share one arithmetic, so that the encoder knows bit for bit what the decoder gets.

References that are kept in 8 bits have a quantiser of their own. Both ends of a link quantise them, perhaps on devices
whose logarithms, roots and sums differ in the last bit, and must come to the same. So it has only what IEEE 754 rounds
alike everywhere: comparisons, single products, and whole numbers.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch


class Grid(NamedTuple):
    """Levels that lie evenly around zero."""

    levels: int
    per_byte: int
    """How many values a byte holds, as digits of a number to the base of `levels`."""
    width: float
    """Of a level, in root mean squares of a row."""

    @property
    def by_maximum(self) -> bool:
        """Whether the row's maximum has the outermost level, as if it were so many root mean squares."""
        return self.levels == 256

    @property
    def reach(self) -> float:
        """The outermost level's far edge, in root mean squares."""
        return self.width * self.levels / 2


GRIDS = {
    1: Grid(2, 8, 1.596),
    1.6: Grid(3, 5, 1.1 * 1.224),
    2: Grid(4, 4, 1.1 * 0.9957),
    2.7: Grid(6, 3, 1.1 * 0.7334),
    4: Grid(16, 2, 0.3352),
    8: Grid(256, 1, 0.03087),
}
"""By bits per value. The widths lose least on a normal distribution (J. Max, "Quantizing for minimum distortion", 1960,
table II); differences between steps have heavier tails, and with few levels a tenth more is better."""
ROW = 64
"""Values that share a scale, at least, where heads are smaller than that and their tokens can be put together."""
PER_OCTAVE, ORIGIN = 6, 168
"""A scale takes a byte: the nearest of six per octave from 2**-27.8 to 2**14.3; of maxima, the next above."""
_ZERO, NOT_FINITE = 0, 255
_LEAST_OCTAVE, _MOST = 26, 127
"""Of what is kept in 8 bits: maxima of rows go from about 2**-26 to 2**16.3, above what float16 has; and the level of a
row's maximum."""


@functools.cache
def tokens_per_row(bits: float, dim: int, tokens: int, all_go: bool) -> int:
    """How many tokens of a head share a scale. In 8 bits each has its own: what comes of a token then depends on
    nothing else.

    Args:
        bits: one of GRIDS.
        dim: of a head.
        tokens: of a group.
        all_go: whether all of them are sent; where they are chosen, each has its own scale too.
    """
    return math.gcd(max(1, ROW // dim), tokens) if all_go and not GRIDS[bits].by_maximum else 1


def row_bytes(bits: float, size: int) -> int:
    """That the levels of a row of so many values take."""
    return -(-size // GRIDS[bits].per_byte)


def quantize(values: torch.Tensor, bits: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise rows.

    Args:
        values: shape (..., D), floating.
        bits: one of GRIDS.

    Returns:
        Levels, packed, uint8 of shape (..., :func:`row_bytes`); scales, uint8 of shape (..., 1); and what
        :func:`dequantize` makes of the two. A row with a value that is not finite has the scale of none.
    """
    grid, values = GRIDS[bits], values.float()
    if grid.by_maximum:
        scales = _encode_scale(values.abs().amax(-1, keepdim=True).div_(grid.reach), torch.ceil)
    else:
        norms = torch.linalg.vector_norm(values, dim=-1, keepdim=True)  # one pass over the values, a mean takes two
        scales = _encode_scale(norms.mul_(values.shape[-1] ** -0.5), torch.round)
    width = grid.width * _decode_scale(scales)
    levels = values.div(width)
    if grid.levels % 2:
        levels.add_(0.5)
    levels.floor_().nan_to_num_(0.0).add_(grid.levels // 2).clamp_(0, grid.levels - 1)
    return _pack(levels, grid), scales, levels.sub_((grid.levels - 1) / 2).mul_(width)


def dequantize(packed: torch.Tensor, scales: torch.Tensor, bits: float, size: int) -> torch.Tensor:
    """The values that levels and scales stand for, float32 (..., size); NaN in rows that were not finite."""
    grid = GRIDS[bits]
    digits = _digits(grid, packed.device).index_select(0, packed.flatten().int())
    values = digits.view(*packed.shape[:-1], packed.shape[-1] * grid.per_byte)[..., :size]
    return values * (grid.width * _decode_scale(scales))


def compact(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values in 8 bits, by a rule that gives the same on every device.

    Args:
        values: shape (..., D), floating.

    Returns:
        Levels, int8 of that shape, and the code of each row's maximum, uint8 of shape (..., 1).
    """
    maxima, _, inverses = _maxima(values.device)
    largest = values.abs().amax(-1, keepdim=True).float()
    code = torch.bucketize(largest, maxima).clamp_(max=NOT_FINITE - 1)  # the least that is no smaller
    code = torch.where(largest.isfinite(), code, NOT_FINITE)
    # The level of what is not finite does not matter: its width is none.
    levels = (values * inverses[code]).round_().nan_to_num_(0.0).clamp_(-_MOST, _MOST)
    return levels.to(torch.int8), code.to(torch.uint8)


def restored(levels: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The values that :func:`compact` kept, float32; NaN in rows that were not finite."""
    return levels * _maxima(codes.device)[1][codes.int()]


@functools.cache
def _maxima(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each code the maximum of a row, the width of its levels, and the inverse of that."""
    maxima = [0.0, *(2.0 ** (code / PER_OCTAVE - _LEAST_OCTAVE) for code in range(1, NOT_FINITE))]
    widths = [maximum / _MOST for maximum in maxima]
    inverses = [1 / width if width else 0.0 for width in widths]
    tables = maxima, [*widths, math.nan], [*inverses, 0.0]
    return tuple(torch.tensor(table, dtype=torch.float32, device=device) for table in tables)


def _encode_scale(scale: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    code = rounded(scale.log2().mul_(PER_OCTAVE)).add_(ORIGIN)
    # A row of zeros has the logarithm -inf.
    code = torch.where(scale.isfinite(), code.clamp_(_ZERO, NOT_FINITE - 1), float(NOT_FINITE))
    return code.to(torch.uint8)


def _decode_scale(code: torch.Tensor) -> torch.Tensor:
    return scale_table(code.device)[code.int()]


@functools.cache
def scale_table(device: torch.device) -> torch.Tensor:
    """The scale of each code: a table, since two devices, or two shapes, may round an exponential differently."""
    table = [2.0 ** ((code - ORIGIN) / PER_OCTAVE) for code in range(256)]
    table[_ZERO], table[NOT_FINITE] = 0.0, float("nan")
    return torch.tensor(table, dtype=torch.float32, device=device)


def _pack(levels: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Several levels, whole numbers in float32, per byte, the first as its lowest digit."""
    if rest := levels.shape[-1] % grid.per_byte:
        levels = torch.nn.functional.pad(levels, (0, grid.per_byte - rest))
    parts = levels.unflatten(-1, (-1, grid.per_byte))
    return (parts @ _weights(grid, levels.device)).to(torch.uint8)  # exact: a byte has 8 bits, a float 24


@functools.cache  # made once: the host waits for what it copies to a device
def _weights(grid: Grid, device: torch.device) -> torch.Tensor:
    """Of the levels in a byte."""
    weights = [float(grid.levels**place) for place in range(grid.per_byte)]
    return torch.tensor(weights, dtype=torch.float32, device=device)


@functools.cache
def _digits(grid: Grid, device: torch.device) -> torch.Tensor:
    """Of each byte the levels that it holds, counted from the middle: float32 (256, per_byte)."""
    table = [[byte // grid.levels**place % grid.levels for place in range(grid.per_byte)] for byte in range(256)]
    return torch.tensor(table, dtype=torch.float32, device=device) - (grid.levels - 1) / 2
