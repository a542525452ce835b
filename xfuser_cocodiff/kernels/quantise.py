"""Values in a few bits: a uniform quantiser whose step follows the root mean square of each row.

Encoder and decoder share one arithmetic, so that the encoder knows bit for bit what the decoder gets.

References that are kept in 8 bits have a quantiser of their own. Both ends of a link quantise them, perhaps on devices
whose logarithms, roots and sums differ in the last bit, and must come to the same. So it has only what IEEE 754 rounds
alike everywhere: comparisons, single products, and whole numbers.
"""

import functools
import math

import torch

STEPS = {1: 1.596, 2: 0.9957, 4: 0.3352, 8: 0.03087}
"""Bits per value, and the width of a level in root mean squares: what loses least on a normal distribution.

Levels lie at odd multiples of half of it (J. Max, "Quantizing for minimum distortion", 1960, table II).
"""
PER_OCTAVE, ORIGIN = 6, 168
"""A scale takes a byte: the nearest of six per octave from 2**-27.8 to 2**14.3."""
_ZERO, NOT_FINITE = 0, 255
_LEAST_OCTAVE, _MOST = 26, 127
"""Of what is kept in 8 bits: maxima of rows go from about 2**-26 to 2**16.3, above what float16 has; and the level of a
row's maximum."""


def quantise(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise rows.

    Args:
        values: shape (..., D), floating; D * bits a multiple of 8.
        bits: one of STEPS.

    Returns:
        Levels, packed, uint8 of shape (..., D * bits / 8); scales, uint8 of shape (..., 1); and what :func:`dequantise`
        makes of the two. A row with a value that is not finite has the scale of none.
    """
    values = values.float()
    norms = torch.linalg.vector_norm(values, dim=-1, keepdim=True)  # one pass over the values, where a mean takes two
    scales = _encode_scale(norms.mul_(values.shape[-1] ** -0.5))
    width = STEPS[bits] * _decode_scale(scales)
    levels = values.div(width).floor_().nan_to_num_(0.0).add_(2 ** (bits - 1)).clamp_(0, 2**bits - 1)
    return _pack(levels, bits), scales, _at(levels, width, bits)


def dequantise(packed: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """The values that levels and scales stand for, float32; NaN in rows that were not finite."""
    return _at(_unpack(packed, bits).float(), STEPS[bits] * _decode_scale(scales), bits)


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
    return tuple(torch.tensor(table, device=device) for table in tables)


def _at(levels: torch.Tensor, width: torch.Tensor, bits: int) -> torch.Tensor:
    """Values of levels, in their place."""
    return levels.sub_(2 ** (bits - 1) - 0.5).mul_(width)


def _encode_scale(scale: torch.Tensor) -> torch.Tensor:
    code = scale.log2().mul_(PER_OCTAVE).round_().add_(ORIGIN)
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
    return torch.tensor(table, device=device)


def _pack(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Several levels, whole numbers in float32, per byte, the first in the lowest bits."""
    parts = levels.unflatten(-1, (-1, 8 // bits))
    return (parts @ _weights(bits, levels.device)).to(torch.uint8)  # exact: a byte has 8 bits, a float 24


@functools.cache  # made once: the host waits for what it copies to a device
def _weights(bits: int, device: torch.device) -> torch.Tensor:
    """Of the levels in a byte."""
    return torch.tensor([2.0**shift for shift in range(0, 8, bits)], device=device)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of :func:`_pack`, uint8. Halves of what a word holds are moved apart until each level has a byte."""
    words = packed.to({8: torch.uint8, 4: torch.int16, 2: torch.int32, 1: torch.int64}[bits])
    half = 4
    while half >= bits:
        lane = 8 * half // bits
        mask = sum((2**half - 1) << place for place in range(0, 64 // bits, lane))
        words = (words | words << lane - half) & mask
        half //= 2
    return words.view(torch.uint8)  # the lowest byte first, as on all machines that PyTorch runs on
