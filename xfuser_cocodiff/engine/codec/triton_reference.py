"""The device function that stores rows as an int8 link reference, as `quantize.to_int8` does, bit for bit."""

import triton
import triton.language as tl

from xfuser_cocodiff.engine.codec import quantize
from xfuser_cocodiff.engine.codec.triton_tensors import NUM_CODES

_PER_OCTAVE, _LOWEST_OCTAVE = tl.constexpr(quantize.PER_OCTAVE), tl.constexpr(quantize.INT8_LOWEST_OCTAVE)
_NOT_FINITE = tl.constexpr(quantize.NOT_FINITE)
_THRESHOLDS = tl.constexpr(quantize.INT8_THRESHOLDS)
_MOST = tl.constexpr(127.0)


@triton.jit
def store_reference(tensor, decoded, row, offset, valid, inside, tables):
    """Write decoded rows to the new reference.

    Args:
        tensor: the tensor.
        decoded: float32 (rows, columns).
        row: number of each row, counted over links.
        offset: offset of the values in the reference.
        valid: which rows exist.
        inside: which values exist.
        tables: scale of each code of residuals, then width and inverse width of each code of references, float32.
    """
    largest = tl.max(tl.where(inside, tl.abs(decoded), 0.0), 1)
    is_finite = tl.sum(tl.where(inside, decoded * 0.0, 0.0), 1) == 0.0  # a maximum may ignore NaN
    bits = largest.to(tl.int32, bitcast=True)
    mantissa = bits & 0x7FFFFF
    code = _PER_OCTAVE * ((bits >> 23) - 127 + _LOWEST_OCTAVE)
    for step in tl.static_range(_PER_OCTAVE):
        code += (mantissa > _THRESHOLDS[step]).to(tl.int32)
    code = tl.minimum(tl.maximum(code, 1), _NOT_FINITE - 1)
    code = tl.where(largest == 0.0, 0, code)
    code = tl.where(is_finite, code, _NOT_FINITE)
    inverse = tl.load(tables + 2 * NUM_CODES + code)
    level = tl.floor(decoded * inverse[:, None] + 0.5)
    level = tl.where(level == level, level, 0.0)
    level = tl.minimum(tl.maximum(level, -_MOST), _MOST)
    tl.store(tensor.new_reference + offset, level.to(tl.int8), mask=inside)
    tl.store(tensor.new_codes + row, code.to(tl.uint8), mask=valid)
