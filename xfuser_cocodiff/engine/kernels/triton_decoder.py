"""The Triton kernel that decodes all tensors of a message: they follow each other in the programs of the grid."""

import triton
import triton.language as tl

from xfuser_cocodiff.engine.kernels.triton_tensors import (
    dequantize,
    load_base,
    load_channel_scales,
    locate_program,
    locate_rows,
    predict,
    read_size,
    row_start,
    tokens_of,
    zero_not_finite,
)


@triton.jit
def decode_kernel(tensors, codecs: tl.constexpr, scale_table):
    """Decode tensors into their targets, and write their new references.

    Args:
        tensors: a TensorArguments for each tensor.
        codecs: the CodecConstants of each tensor.
        scale_table: scale of each code, float32 (256).
    """
    first = 0
    for number in tl.static_range(len(codecs)):
        program = tl.program_id(0) - first
        if (program >= 0) & (program < read_size(tensors[number].programs)):
            _decode_rows(tensors[number], codecs, number, program, scale_table)
        first += read_size(tensors[number].programs)


@triton.jit
def _decode_rows(tensor, codecs: tl.constexpr, index: tl.constexpr, program, scale_table):
    """Decode the rows of a program into the new reference and the target; see :func:`triton_encoder._encode_rows`."""
    codec: tl.constexpr = codecs[index]
    link, number, sending = locate_program(tensor, codec, program)
    if tensor.order is not None:
        if number < sending:
            _decode_tiles(tensor, codec, link, number, scale_table, True)
        else:
            _decode_tiles(tensor, codec, link, number - sending, scale_table, False)
    else:
        _decode_tiles(tensor, codec, link, number, scale_table, True)


@triton.jit
def _decode_tiles(tensor, codec: tl.constexpr, link, number, scale_table, sends: tl.constexpr):
    """Decode rows that were all sent, or predict rows none of which was."""
    levels: tl.constexpr = codec.levels
    per_byte: tl.constexpr = codec.per_byte
    size: tl.constexpr = codec.row_tokens * codec.dim
    block: tl.constexpr = codec.block
    block_rows: tl.constexpr = codec.block_rows
    is_across_rows: tl.constexpr = codec.is_across_rows
    slot = link + (link >= read_size(tensor.local_start)) * read_size(tensor.local_count)
    message = tensor.payload + slot.to(tl.int64) * tensor.stride_payload
    gain = 0
    if tensor.gain_offset is not None:
        gain = tl.load(message.to(tl.pointer_type(tl.uint8)) + read_size(tensor.gain_offset))
    elif tensor.previous is not None:
        gain = tl.load(tensor.gains + link)
    column = tl.arange(0, block)
    packed = tl.zeros([block_rows, block], tl.int32)
    if sends and is_across_rows:
        rows = read_size(tensor.groups) * read_size(tensor.heads) * (read_size(tensor.active) // codec.row_tokens)
        index = number * block_rows + tl.arange(0, block_rows)
        inside = (index < tl.cdiv(rows, per_byte))[:, None] & (column < size)[None, :]
        packed = tl.load(message + index.to(tl.int64)[:, None] * size + column[None, :], mask=inside, other=0)
        packed = packed.to(tl.int32)
    for tile in range(tensor.tiles):
        row, valid, group, head, first_token, start = locate_rows(tensor, codec, link, number, tile, sends)
        inside, offset = valid[:, None] & (column < size)[None, :], start[:, None] + column[None, :]
        token, inner = tokens_of(first_token, column, codec.dim, codec.row_tokens)
        if tensor.reference is not None:
            predicted, _, _ = predict(tensor.reference, tensor.previous, offset, inside, gain)
            decoded = predicted
        if sends:
            if levels:
                if is_across_rows:
                    rest = packed // levels
                    level, packed = packed - rest * levels, rest
                else:  # digits are bit fields
                    row_bytes: tl.constexpr = (size + per_byte - 1) // per_byte
                    pointers = message + row.to(tl.int64)[:, None] * row_bytes + (column // per_byte)[None, :]
                    byte = tl.load(pointers, mask=inside, other=0).to(tl.int32)
                    level = (byte >> (column % per_byte * (8 // per_byte))[None, :]) & (levels - 1)
                code = tl.load(message + read_size(tensor.scales_offset) + row, mask=valid, other=0).to(tl.int32)
                width = tl.load(scale_table + code)[:, None] * codec.level_width
                channel_scales = 1.0
                if tensor.channel_scales is not None:
                    channel_scales = load_channel_scales(tensor, codec.dim, link, head, inner, inside)
                decoded = dequantize(level, width, channel_scales, predicted, (levels - 1) / 2)
            else:
                decoded = tl.load(message + row.to(tl.int64)[:, None] * size + column[None, :], mask=inside, other=0.0)
        if tensor.reference is not None:
            tl.store(tensor.new_reference + offset, decoded, mask=inside)
        else:
            tl.store(tensor.new_reference + offset, zero_not_finite(decoded), mask=inside)
        outer = row_start(
            slot, group[:, None], head[:, None], token,
            tensor.stride_slot, tensor.stride_group, tensor.stride_head, tensor.stride_token,
        )  # fmt: skip
        if tensor.base is not None:
            added = load_base(
                tensor.base, tensor.weight, link, group[:, None], head[:, None], token, inner[None, :], inside,
                tensor.stride_base_link, tensor.stride_base_group, tensor.stride_base_head, tensor.stride_base_token,
            )  # fmt: skip
            decoded = (added + decoded.to(tl.float32)).to(decoded.dtype)
        tl.store(tensor.data + outer + inner[None, :], decoded, mask=inside)
