"""The Triton kernel that encodes all tensors of a message: they follow each other in the programs of the grid."""

import inspect

import triton
import triton.language as tl

from xfuser_cocodiff.engine.codec import quantize
from xfuser_cocodiff.engine.codec.triton_reference import store_reference
from xfuser_cocodiff.engine.codec.triton_tensors import (
    NUM_CODES,
    UNIT_GAIN,
    dequantize,
    load_base,
    locate_row,
    predict,
    read_size,
    row_start,
    rows_of,
    tokens_of,
)

_PER_OCTAVE, _ORIGIN = tl.constexpr(float(quantize.PER_OCTAVE)), tl.constexpr(float(quantize.ORIGIN))
_NOT_FINITE = tl.constexpr(float(quantize.NOT_FINITE))
_CAN_DISABLE_LICM = tl.constexpr("disable_licm" in inspect.signature(tl.range.__init__).parameters)
"""Whether this Triton can keep loop invariants inside of a loop; not those before 3.5."""
_SUMS_BLOCK = tl.constexpr(256)
"""Number of programs whose sums are read at once."""


@triton.jit
def encode_kernel(tensors, shapes: tl.constexpr, tables, sums, energies, counters):
    """Encode tensors, and write their new references and the sums over their values.

    Args:
        tensors: a TensorArguments for each tensor.
        shapes: a RowShape for each tensor.
        tables: see :func:`triton_reference.store_reference`.
        sums: float32 (programs, 4): sums of each program.
        energies: float32 (number of tensors, 2), written: error energy and value energy.
        counters: int32 (number of tensors or more): zeros, and zeros again when the kernel ends.
    """
    first = 0
    for number in tl.static_range(len(shapes)):  # a variable for the tensor would hold no constants
        program = tl.program_id(0) - first  # the grid has one dim: CUDA limits the others to 65,535 programs
        if (program >= 0) & (program < read_size(tensors[number].programs)):
            _encode_rows(tensors[number], shapes, number, program, tables, sums + 4 * tl.program_id(0))
            _reduce_in_last_program(tensors[number], sums + 4 * first, energies + 2 * number, counters + number)
        first += read_size(tensors[number].programs)


@triton.jit
def _encode_rows(tensor, shapes: tl.constexpr, index: tl.constexpr, program, tables, sums):
    """Encode the rows of a program, and write their new reference.

    Args:
        tensor: the tensor.
        shapes, index: the RowShapes of all tensors, and the tensor's index among them.
        program: index of the program among those of the tensor.
        tables: see :func:`triton_reference.store_reference`.
        sums: float32 (4), written: error energy, value energy, numerator and denominator of the gain.
    """
    shape: tl.constexpr = shapes[index]
    size: tl.constexpr = shape.dim * shape.row_tokens
    programs = read_size(tensor.programs) // read_size(tensor.links)
    link, rows, per_unit = program // programs, rows_of(tensor, shape.row_tokens), read_size(tensor.per_unit)
    slot = link + (link >= read_size(tensor.local_start)) * read_size(tensor.local_count)
    message = tensor.payload + slot.to(tl.int64) * tensor.stride_payload
    gain = 0
    if tensor.gain_offset is not None:  # every program of a link writes the same
        gain = tl.load(tensor.gains + link)
        tl.store(message + read_size(tensor.gain_offset), gain)
    column = tl.arange(0, shape.block)
    unit = program % programs * shape.block_rows + tl.arange(0, shape.block_rows)
    packed, weight = tl.zeros([shape.block_rows, shape.block], tl.int32), 1
    error_energy, value_energy = tl.zeros([shape.block_rows], tl.float32), tl.zeros([shape.block_rows], tl.float32)
    numerator, denominator = tl.zeros([shape.block_rows], tl.float32), tl.zeros([shape.block_rows], tl.float32)
    if _CAN_DISABLE_LICM:  # hoisted invariants would take registers
        for tile in tl.range(per_unit, disable_licm=True):
            level, error, energy, moved, changed = _encode_tile(
                tensor, shape, slot, link, rows, unit * per_unit + tile, message, gain, tables
            )
            packed, weight = packed + level * weight, weight * read_size(tensor.levels)
            error_energy, value_energy = error_energy + error, value_energy + energy
            numerator, denominator = numerator + moved, denominator + changed
    else:
        for tile in range(per_unit):
            level, error, energy, moved, changed = _encode_tile(
                tensor, shape, slot, link, rows, unit * per_unit + tile, message, gain, tables
            )
            packed, weight = packed + level * weight, weight * read_size(tensor.levels)
            error_energy, value_energy = error_energy + error, value_energy + energy
            numerator, denominator = numerator + moved, denominator + changed
    inside = (unit < tl.cdiv(rows, per_unit))[:, None] & (column < size)[None, :]
    units = message.to(tl.pointer_type(tl.int16)) + unit.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(units, packed.to(tl.int16), mask=inside)
    tl.store(sums, tl.sum(error_energy))
    tl.store(sums + 1, tl.sum(value_energy))
    tl.store(sums + 2, tl.sum(numerator))
    tl.store(sums + 3, tl.sum(denominator))


@triton.jit
def _encode_tile(tensor, shape: tl.constexpr, slot, link, rows, row, message, gain, tables):
    """Encode a tile, and write its new reference and its scales.

    Args:
        tensor: the tensor.
        shape: its RowShape.
        slot, link: slot and link of the rows.
        rows: number of rows of a link.
        row: number of each row among those of the link; there may be none of that number.
        message: pointer to the link's payload.
        gain: gain of the link in units of 1 / GAIN_STEPS.
        tables: see :func:`triton_reference.store_reference`.

    Returns:
        Levels, int32 (rows, columns), and sums over each row, float32 (rows): error energy, value energy, numerator and
        denominator of the gain.
    """
    dim: tl.constexpr = shape.dim
    row_tokens: tl.constexpr = shape.row_tokens
    size: tl.constexpr = dim * row_tokens
    column = tl.arange(0, shape.block)
    moved, changed = tl.zeros([shape.block_rows], tl.float32), tl.zeros([shape.block_rows], tl.float32)
    valid = row < rows
    inside = valid[:, None] & (column < size)[None, :]
    of_all = link * rows + row
    offset = of_all.to(tl.int64)[:, None] * size + column[None, :]
    group, head, first_token = locate_row(tensor, row, row_tokens)
    token, inner = tokens_of(first_token, column, dim, row_tokens)
    outer = row_start(
        slot, group[:, None], head[:, None], token,
        tensor.stride_slot, tensor.stride_group, tensor.stride_head, tensor.stride_token,
    )  # fmt: skip
    value = tl.load(tensor.data + outer + inner[None, :], mask=inside, other=0.0).to(tl.float32)
    energy = tl.sum(value * value, 1)
    if tensor.base is not None:  # the value is the difference from here on
        value -= load_base(tensor, link, group[:, None], head[:, None], token, inner[None, :], inside)
    predicted, current, change = predict(tensor, of_all, offset, valid, inside, gain, tables + NUM_CODES)
    if tensor.previous is not None:  # before the values are quantized, so that fewer registers are in use
        sampled = inside & (token % read_size(tensor.stride_sample) == 0)
        moved = tl.sum(tl.where(sampled, (value - current) * change, 0.0), 1)
        changed = tl.sum(tl.where(sampled, change * change, 0.0), 1)
    level, code, width = _quantize(tl.where(inside, value - predicted, 0.0), tables, tensor)
    decoded = dequantize(level, width, predicted, read_size(tensor.levels))
    tl.store(message + read_size(tensor.scales_offset) + row, code.to(tl.uint8), mask=valid)
    store_reference(tensor, decoded, of_all, offset, valid, inside, tables)
    error = tl.where(inside, value - decoded, 0.0)
    return tl.where(inside, level, 0.0).to(tl.int32), tl.sum(error * error, 1), energy, moved, changed


@triton.jit
def _quantize(residual, tables, tensor):
    """Return the level of each residual, float32, and the code of the scale and the width of the levels of each row.

    Args:
        residual: float32 (rows, columns), 0 where there is no value.
        tables: see :func:`triton_reference.store_reference`.
        tensor: the tensor.
    """
    energy, largest = tl.sum(residual * residual, 1), tl.max(tl.abs(residual), 1)
    scale = tl.maximum(tl.sqrt(energy) * tensor.norm_weight, largest * tensor.peak_weight)
    code = tl.floor(tl.log2(scale) * _PER_OCTAVE + (_ORIGIN + tensor.rounding))
    code = tl.minimum(tl.maximum(code, 0.0), _NOT_FINITE - 1.0)
    code = tl.where(energy < float("inf"), code, _NOT_FINITE).to(tl.int32)
    width = tl.load(tables + code)[:, None] * tensor.level_width
    inverse = tl.where(width > 0.0, 1.0 / width, 0.0)
    levels = read_size(tensor.levels).to(tl.float32)
    level = tl.floor(residual * inverse + levels * 0.5)
    level = tl.where(level == level, level, 0.0)
    return tl.minimum(tl.maximum(level, 0.0), levels - 1.0), code, width


@triton.jit
def _reduce_in_last_program(tensor, sums, energies, counter):
    """Reduce the sums of all programs of a tensor to energies and gains, in the program that ends last.

    The order of the sums is that of the programs: results do not depend on which program is last.

    Args:
        tensor: the tensor.
        sums: float32 (programs, 4): sums of each program.
        energies: float32 (2), written.
        counter: number of programs that have ended, reset by the last one.
    """
    tl.debug_barrier()  # the sums are written
    if tl.atomic_add(counter, 1, sem="acq_rel") == read_size(tensor.programs) - 1:
        tl.store(counter, 0)
        programs = read_size(tensor.programs) // read_size(tensor.links)
        index, field = tl.arange(0, _SUMS_BLOCK), tl.arange(0, 4)
        of_tensor = tl.zeros([4], tl.float32)
        for link in range(read_size(tensor.links)):
            total = tl.zeros([_SUMS_BLOCK, 4], tl.float32)
            for first in range(0, programs, _SUMS_BLOCK):
                pointers = sums + 4 * (link * programs + first + index)[:, None] + field[None, :]
                inside = (first + index < programs)[:, None]  # the first-level cache may not hold other programs' sums
                total += tl.load(pointers, mask=inside, other=0.0, cache_modifier=".cg")
            of_link = tl.sum(total, 0)
            of_tensor += of_link
            if tensor.previous is not None:
                numerator, denominator = (
                    tl.sum(tl.where(field == 2, of_link, 0.0)), tl.sum(tl.where(field == 3, of_link, 0.0))
                )  # fmt: skip
                gain = tl.floor(numerator / denominator * UNIT_GAIN + 0.5)
                gain = tl.where(gain == gain, tl.minimum(tl.maximum(gain, 0.0), UNIT_GAIN), 0.0)
                tl.store(tensor.gains + link, gain.to(tl.uint8))
        tl.store(energies + field, of_tensor, mask=field < 2)
