"""The Triton kernel that encodes all tensors of a message: they follow each other in the programs of the grid."""

import inspect

import triton
import triton.language as tl

from xfuser_cocodiff.engine.kernels.triton_tensors import (
    UNIT_GAIN,
    dequantize,
    divide_by_power,
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

_CAN_DISABLE_LICM = tl.constexpr("disable_licm" in inspect.signature(tl.range.__init__).parameters)
"""Whether this Triton can keep loop invariants inside of a loop; not those before 3.5."""


@triton.jit
def encode_kernel(tensors, codecs: tl.constexpr, scale_table, sums, energies, counters):
    """Encode tensors, and write their new references and the sums over their values.

    Args:
        tensors: a TensorArguments for each tensor.
        codecs: the CodecConstants of each tensor.
        scale_table: scale of each code, float32 (256).
        sums: float32 (programs, 4): sums of each program.
        energies: float32 (number of tensors, 2), written: error energy and value energy.
        counters: int32 (number of tensors or more): zeros, and zeros again when the kernel ends.
    """
    first = 0
    for number in tl.static_range(len(codecs)):  # a variable for the tensor would hold no constants
        program = tl.program_id(0) - first  # the grid has one dim: CUDA limits the others to 65,535 programs
        if (program >= 0) & (program < read_size(tensors[number].programs)):
            _encode_rows(tensors[number], codecs, number, program, scale_table, sums + 4 * tl.program_id(0))
            if tensors[number].reference is not None:
                _reduce_in_last_program(tensors[number], sums + 4 * first, energies + 2 * number, counters + number)
        first += read_size(tensors[number].programs)


@triton.jit
def _encode_rows(tensor, codecs: tl.constexpr, index: tl.constexpr, program, scale_table, sums):
    """Encode the rows of a program, and write their new reference.

    Args:
        tensor: the tensor.
        codecs: the CodecConstants of each tensor.
        index: index of the tensor.
        program: index of the program among those of the tensor.
        scale_table: scale of each code, float32 (256).
        sums: float32 (4), written: error energy, value energy, numerator and denominator of the gain.
    """
    codec: tl.constexpr = codecs[index]
    link, number, sending = locate_program(tensor, codec, program)
    if tensor.order is not None:
        if number < sending:
            _encode_tiles(tensor, codec, link, number, scale_table, sums, True)
        else:
            _encode_tiles(tensor, codec, link, number - sending, scale_table, sums, False)
    else:
        _encode_tiles(tensor, codec, link, number, scale_table, sums, True)


@triton.jit
def _encode_tiles(tensor, codec: tl.constexpr, link, number, scale_table, sums, sends: tl.constexpr):
    """Encode rows that are all sent, or predict rows none of which is; see :func:`_encode_rows`."""
    levels: tl.constexpr = codec.levels
    per_byte: tl.constexpr = codec.per_byte
    size: tl.constexpr = codec.row_tokens * codec.dim
    block: tl.constexpr = codec.block
    block_rows: tl.constexpr = codec.block_rows
    is_across_rows: tl.constexpr = codec.is_across_rows
    slot = link + (link >= read_size(tensor.local_start)) * read_size(tensor.local_count)
    message = tensor.payload + slot.to(tl.int64) * tensor.stride_payload
    gain = 0
    if (tensor.previous is not None) or (tensor.gain_offset is not None):
        gain = tl.load(tensor.gains + link)
    if tensor.gain_offset is not None:  # every program of a link writes the same
        tl.store(message.to(tl.pointer_type(tl.uint8)) + read_size(tensor.gain_offset), gain)
    column = tl.arange(0, block)
    packed, weight = tl.zeros([block_rows, block], tl.int32), 1
    error_energy, value_energy = tl.zeros([block_rows], tl.float32), tl.zeros([block_rows], tl.float32)
    numerator, denominator = tl.zeros([block_rows], tl.float32), tl.zeros([block_rows], tl.float32)
    if _CAN_DISABLE_LICM:  # hoisted invariants would take registers
        for tile in tl.range(tensor.tiles, disable_licm=True):
            level, error, energy, moved, changed = _encode_tile(
                tensor, codec, slot, link, number, tile, message, gain, scale_table, sends
            )
            packed, weight = packed + level * weight, weight * levels
            error_energy, value_energy = error_energy + error, value_energy + energy
            numerator, denominator = numerator + moved, denominator + changed
    else:
        for tile in range(tensor.tiles):
            level, error, energy, moved, changed = _encode_tile(
                tensor, codec, slot, link, number, tile, message, gain, scale_table, sends
            )
            packed, weight = packed + level * weight, weight * levels
            error_energy, value_energy = error_energy + error, value_energy + energy
            numerator, denominator = numerator + moved, denominator + changed
    if sends and is_across_rows:
        rows = read_size(tensor.groups) * read_size(tensor.heads) * (read_size(tensor.active) // codec.row_tokens)
        index = number * block_rows + tl.arange(0, block_rows)
        inside = (index < tl.cdiv(rows, per_byte))[:, None] & (column < size)[None, :]
        tl.store(message + index.to(tl.int64)[:, None] * size + column[None, :], packed.to(tl.uint8), mask=inside)
    if tensor.reference is not None:
        tl.store(sums, tl.sum(error_energy))
        tl.store(sums + 1, tl.sum(value_energy))
        tl.store(sums + 2, tl.sum(numerator))
        tl.store(sums + 3, tl.sum(denominator))


@triton.jit
def _encode_tile(
    tensor, codec: tl.constexpr, slot, link, number, tile, message, gain, scale_table, sends: tl.constexpr
):
    """Encode a tile, and write its new reference, its scales, and its levels unless bytes go across rows.

    Args:
        tensor: the tensor.
        codec: its CodecConstants.
        slot, link: slot and link of the rows.
        number, tile: see :func:`triton_tensors.locate_rows`.
        message: pointer to the link's payload.
        gain: gain of the link in units of 1 / GAIN_STEPS.
        scale_table: scale of each code, float32 (256).
        sends: whether the rows are sent.

    Returns:
        Levels, int32 (rows, columns), and sums over each row, float32 (rows): error energy, value energy, numerator and
        denominator of the gain.
    """
    levels: tl.constexpr = codec.levels
    size: tl.constexpr = codec.row_tokens * codec.dim
    column = tl.arange(0, codec.block)
    level = tl.zeros([codec.block_rows, codec.block], tl.int32)
    errors, moved, changed = (
        tl.zeros([codec.block_rows], tl.float32),
        tl.zeros([codec.block_rows], tl.float32),
        tl.zeros([codec.block_rows], tl.float32),
    )
    row, valid, group, head, first_token, start = locate_rows(tensor, codec, link, number, tile, sends)
    inside, offset = valid[:, None] & (column < size)[None, :], start[:, None] + column[None, :]
    token, inner = tokens_of(first_token, column, codec.dim, codec.row_tokens)
    outer = row_start(
        slot, group[:, None], head[:, None], token,
        tensor.stride_slot, tensor.stride_group, tensor.stride_head, tensor.stride_token,
    )  # fmt: skip
    value = tl.load(tensor.data + outer + inner[None, :], mask=inside, other=0.0)
    exact = value.to(tl.float32)
    energy = tl.sum(exact * exact, 1)
    if tensor.base is not None:  # the value is the difference from here on
        subtracted = load_base(
            tensor.base, tensor.weight, link, group[:, None], head[:, None], token, inner[None, :], inside,
            tensor.stride_base_link, tensor.stride_base_group, tensor.stride_base_head, tensor.stride_base_token,
        )  # fmt: skip
        value = (exact - subtracted).to(value.dtype)
    decoded = value
    if tensor.reference is not None:
        predicted, current, change = predict(tensor.reference, tensor.previous, offset, inside, gain)
        decoded = predicted
        if tensor.previous is not None:  # before the values are quantized, so that fewer registers are in use
            sampled, delta = inside & (token % read_size(tensor.stride_sample) == 0), change.to(tl.float32)
            difference = value.to(tl.float32) - current.to(tl.float32)
            moved = tl.sum(tl.where(sampled, difference * delta, 0.0), 1)
            changed = tl.sum(tl.where(sampled, delta * delta, 0.0), 1)
    if sends:
        if levels:
            residual = (value.to(tl.float32) - predicted.to(tl.float32)).to(value.dtype).to(tl.float32)
            residual, channel_scales = tl.where(inside, residual, 0.0), 1.0
            if tensor.channel_scales is not None:
                channel_scales = load_channel_scales(tensor, codec.dim, link, head, inner, inside)
                residual = divide_by_power(residual, channel_scales)
            level, code, width = _quantize(residual, scale_table, tensor.reference_norm, codec)
            decoded = dequantize(level, width, channel_scales, predicted, (levels - 1) / 2)
            level = tl.where(inside, level, 0)
            if not codec.is_across_rows:
                _store_row_bytes(message, row, valid, level, size, levels, codec.per_byte)
            tl.store(message + read_size(tensor.scales_offset) + row, code.to(tl.uint8), mask=valid)
        else:
            tl.store(message + row.to(tl.int64)[:, None] * size + column[None, :], value, mask=inside)
            decoded = value
    if tensor.reference is not None:
        tl.store(tensor.new_reference + offset, decoded, mask=inside)
        error = (value.to(tl.float32) - decoded.to(tl.float32)).to(value.dtype).to(tl.float32)
        errors = tl.sum(tl.where(inside, error * error, 0.0), 1)
    else:
        tl.store(tensor.new_reference + offset, zero_not_finite(value), mask=inside)
    return level, errors, energy, moved, changed


@triton.jit
def _quantize(residual, scale_table, reference_norm, codec: tl.constexpr):
    """Return the level of each residual, and the code of the scale and the width of the levels of each row.

    Args:
        residual: float32 (rows, columns), 0 where there is no value.
        scale_table: scale of each code, float32 (256).
        reference_norm: see :class:`TensorArguments`.
        codec: its CodecConstants.
    """
    levels: tl.constexpr = codec.levels
    energy = tl.sum(residual * residual, 1)
    largest = tl.max(tl.abs(residual), 1)
    if codec.by_maximum:
        code = tl.ceil(tl.log2(largest * reference_norm) * codec.per_octave) + codec.origin
    else:
        scale = tl.maximum(tl.sqrt(energy) * reference_norm, largest * codec.peak_share)
        code = tl.floor(tl.log2(scale) * codec.per_octave + codec.origin + 0.5)
    code = tl.minimum(tl.maximum(code, 0.0), codec.not_finite - 1.0)
    code = tl.where(energy < float("inf"), code, codec.not_finite).to(tl.int32)
    width = tl.load(scale_table + code)[:, None] * codec.level_width
    if levels > 6:
        level = tl.floor(tl.div_rn(residual, width))
        level = tl.where(level == level, level, 0.0) + levels // 2
        level = tl.minimum(tl.maximum(level, 0.0), levels - 1.0).to(tl.int32)
    else:  # the same result without a division: one comparison per edge between levels
        edge = tl.maximum(width, codec.min_width)
        level = tl.zeros(residual.shape, tl.int32)
        for number in tl.static_range(1, levels):
            limit = edge * (number - levels / 2)  # Triton 3.7 and 3.8 do not interpret a constant times a tensor
            level += (residual >= limit).to(tl.int32)
        level = tl.where((code == codec.not_finite)[:, None], levels // 2, level)
    return level, code, width


@triton.jit
def _store_row_bytes(message, row, valid, level, size: tl.constexpr, levels: tl.constexpr, per_byte: tl.constexpr):
    """Write the levels of rows as bytes, each of them those of `per_byte` adjacent columns."""
    row_bytes: tl.constexpr = (size + per_byte - 1) // per_byte
    digit = tl.arange(0, level.shape[1]) % per_byte
    digits = level << (digit * (8 // per_byte))[None, :]
    packed = tl.sum(tl.reshape(digits, [level.shape[0], level.shape[1] // per_byte, per_byte]), 2)
    index = tl.arange(0, level.shape[1] // per_byte)
    inside = valid[:, None] & (index < row_bytes)[None, :]
    tl.store(message + row.to(tl.int64)[:, None] * row_bytes + index[None, :], packed.to(tl.uint8), mask=inside)


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
        block: tl.constexpr = 256  # programs whose sums are read at once
        index, field = tl.arange(0, block), tl.arange(0, 4)
        of_tensor = tl.zeros([4], tl.float32)
        for link in range(read_size(tensor.links)):
            total = tl.zeros([block, 4], tl.float32)
            for first in range(0, programs, block):
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
                tl.store(tensor.next_gains + link, gain.to(tl.uint8))
        tl.store(energies + field, of_tensor, mask=field < 2)
