"""The Triton kernel that decodes all tensors of a message: they follow each other in the programs of the grid."""

import triton
import triton.language as tl

from xfuser_cocodiff.engine.codec.triton_reference import store_reference
from xfuser_cocodiff.engine.codec.triton_tensors import (
    NUM_CODES,
    dequantize,
    load_base,
    locate_row,
    predict,
    read_size,
    row_start,
    rows_of,
    tokens_of,
)


@triton.jit
def decode_kernel(tensors, shapes: tl.constexpr, tables):
    """Decode tensors into their targets, and write their new references.

    Args:
        tensors: a TensorArguments for each tensor.
        shapes: a RowShape for each tensor.
        tables: see :func:`triton_reference.store_reference`.
    """
    first = 0
    for number in tl.static_range(len(shapes)):
        program = tl.program_id(0) - first
        if (program >= 0) & (program < read_size(tensors[number].programs)):
            _decode_rows(tensors[number], shapes, number, program, tables)
        first += read_size(tensors[number].programs)


@triton.jit
def _decode_rows(tensor, shapes: tl.constexpr, index: tl.constexpr, program, tables):
    """Decode the rows of a program into the new reference and the target; see :func:`triton_encoder._encode_rows`."""
    shape: tl.constexpr = shapes[index]
    dim: tl.constexpr = shape.dim
    row_tokens: tl.constexpr = shape.row_tokens
    size: tl.constexpr = dim * row_tokens
    programs = read_size(tensor.programs) // read_size(tensor.links)
    link, rows, per_unit = program // programs, rows_of(tensor, row_tokens), read_size(tensor.per_unit)
    levels = read_size(tensor.levels)
    slot = link + (link >= read_size(tensor.local_start)) * read_size(tensor.local_count)
    message = tensor.payload + slot.to(tl.int64) * tensor.stride_payload
    gain = 0
    if tensor.gain_offset is not None:
        gain = tl.load(message + read_size(tensor.gain_offset))
    column = tl.arange(0, shape.block)
    unit = program % programs * shape.block_rows + tl.arange(0, shape.block_rows)
    inside = (unit < tl.cdiv(rows, per_unit))[:, None] & (column < size)[None, :]
    units = message.to(tl.pointer_type(tl.int16)) + unit.to(tl.int64)[:, None] * size + column[None, :]
    packed = tl.load(units, mask=inside, other=0).to(tl.int32) & 0xFFFF
    for tile in range(per_unit):
        row = unit * per_unit + tile
        valid = row < rows
        inside = valid[:, None] & (column < size)[None, :]
        of_all = link * rows + row
        offset = of_all.to(tl.int64)[:, None] * size + column[None, :]
        group, head, first_token = locate_row(tensor, row, row_tokens)
        token, inner = tokens_of(first_token, column, dim, row_tokens)
        predicted, _, _ = predict(tensor, of_all, offset, valid, inside, gain, tables + NUM_CODES)
        rest = tl.floor((packed.to(tl.float32) + 0.5) * tensor.inverse_levels).to(tl.int32)  # exact up to 16 bits
        level, packed = (packed - rest * levels).to(tl.float32), rest
        code = tl.load(message + read_size(tensor.scales_offset) + row, mask=valid, other=0).to(tl.int32)
        width = tl.load(tables + code)[:, None] * tensor.level_width
        decoded = dequantize(level, width, predicted, levels)
        store_reference(tensor, decoded, of_all, offset, valid, inside, tables)
        outer = row_start(
            slot, group[:, None], head[:, None], token,
            tensor.stride_slot, tensor.stride_group, tensor.stride_head, tensor.stride_token,
        )  # fmt: skip
        if tensor.base is not None:
            decoded = load_base(tensor, link, group[:, None], head[:, None], token, inner[None, :], inside) + decoded
        tl.store(tensor.data + outer + inner[None, :], decoded.to(tensor.data.dtype.element_ty), mask=inside)
