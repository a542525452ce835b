"""The device code of the Triton backend; :mod:`triton_kernels` launches it.

One launch encodes or decodes all tensors of a message: they follow each other in the programs of the grid. A program
processes some rows of a link, tile by tile; a row is a token of a head, or several tokens if heads are small. All rows
of a program are sent, or none is. Multiply and add are never fused: encoder and decoder must compute the same bits.
"""

import inspect
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from xfuser_cocodiff.engine.kernels import quantize
from xfuser_cocodiff.engine.kernels.rows import GAIN_STEPS

_PER_OCTAVE, _ORIGIN = tl.constexpr(float(quantize.PER_OCTAVE)), tl.constexpr(float(quantize.ORIGIN))
_NOT_FINITE = tl.constexpr(float(quantize.NOT_FINITE))
_PEAK_SHARE = tl.constexpr(quantize.PEAK_SHARE)
_GAIN_STEPS = tl.constexpr(float(GAIN_STEPS))
_MIN_WIDTH = tl.constexpr(torch.finfo(torch.float32).tiny)
"""Replacement for a width of 0 in comparisons."""
_CAN_DISABLE_LICM = tl.constexpr("disable_licm" in inspect.signature(tl.range.__init__).parameters)
"""Whether this Triton can keep loop invariants inside of a loop; not those before 3.5."""
_SUMS_BLOCK = tl.constexpr(256)
"""Number of programs whose sums are read at once."""


class Code(NamedTuple):
    """How a tensor is encoded, as constants of the compiler."""

    levels: tl.constexpr
    """Number of quantization levels; 0 if values are sent unchanged."""
    per_byte: tl.constexpr
    """Values per byte."""
    level_width: tl.constexpr
    """Width of a level at scale 1."""
    by_maximum: tl.constexpr
    """Whether scales follow the row's maximum."""
    dim: tl.constexpr
    """D."""
    row_tokens: tl.constexpr
    """Tokens per row."""
    is_across_rows: tl.constexpr
    """Whether the values of a byte are those of adjacent rows in one column, not of adjacent columns."""
    block: tl.constexpr
    """Columns of a tile: values of a row, rounded up to a power of two."""
    block_rows: tl.constexpr
    """Rows of a tile."""
    tiles: tl.constexpr
    """Tiles of a program; if bytes go across rows, tile k has the k-th row of each byte."""


def unspecialized(size: int) -> int:
    """Return the argument that stands for a size.

    Triton compiles a kernel anew for integers that are 1 and for those that are divisible by 16. So kernels would be
    compiled for each number of tokens, samples and ranks, for seconds in the middle of a run. An odd number from 3 is
    neither.
    """
    return 2 * size + 3


def size_of(argument: int) -> int:
    """Return the size that an argument stands for: the inverse of :func:`unspecialized`."""
    return (argument - 3) // 2


class TensorArguments(NamedTuple):
    """A tensor of a message, as the kernels get it. Triton compiles fields that are None as constants.

    Sizes, offsets and numbers are passed by :func:`unspecialized`; strides of values are not, since those that are
    divisible by 16 allow 16-byte accesses.
    """

    strided: torch.Tensor
    """Values to encode, or target of the decoder, (P, G, H, T, D); D is contiguous."""
    stride_slot: int
    stride_group: int
    stride_head: int
    stride_token: int
    base: torch.Tensor | None
    """Base (L, G, H, T, D) that is subtracted before encoding and added after decoding; D is contiguous."""
    weight: float | None
    """Weight of the base."""
    stride_base_link: int | None
    stride_base_group: int | None
    stride_base_head: int | None
    stride_base_token: int | None
    reference: torch.Tensor | None
    """Link reference (L, G, H, T, D), contiguous; None if values are sent without a prediction."""
    previous: torch.Tensor | None
    """Link reference of the step before; None to predict the reference itself."""
    gains: torch.Tensor | None
    """uint8 (L)."""
    order: torch.Tensor | None
    """Active tokens and then the others of each group, int32 (L, G, T); None if all are sent."""
    payload: torch.Tensor
    """(P, n): uint8, or of the values' type if they are sent unchanged."""
    stride_payload: int
    """Stride of the payload's slots."""
    scales_offset: int
    """Offset of the scales in a slot's payload."""
    gain_offset: int | None
    """Offset of the gain in a slot's payload; None if it carries none."""
    new_reference: torch.Tensor
    """(L, G, H, T, D), contiguous, written."""
    links: int
    groups: int
    heads: int
    tokens: int
    active: int
    """Number of tokens sent per group."""
    local_start: int
    """First slot of this rank, or L without local slots."""
    local_count: int
    """Number of local slots."""
    programs: int
    """Number of programs of this tensor, a multiple of L."""
    tiles: int
    """Tiles of a program; not a constant, so that loops are not unrolled, which would take registers."""
    code: Code
    next_gains: torch.Tensor | None = None
    """Gains for the next step, uint8 (L), written by the encoder if there is a previous reference."""
    reference_norm: float | None = None
    """For the encoder: inverse of the grid's outer edge if scales follow the maximum, else inverse square root of the
    row size."""
    stride_sample: int | None = None
    """For the encoder: stride over the tokens of which gains are estimated."""


@triton.jit
def _size(passed):
    """Return a size from the argument that stands for it, see :func:`unspecialized`."""
    return (passed - 3) >> 1


@triton.jit
def _locate_program(tensor, program):
    """Return the link of a program, its number among those of the link, and how many of these send rows."""
    row_tokens: tl.constexpr = tensor.code.row_tokens
    rows_per_program: tl.constexpr = tensor.code.block_rows * tensor.code.tiles
    rows = _size(tensor.groups) * _size(tensor.heads) * (_size(tensor.active) // row_tokens)
    programs = _size(tensor.programs) // _size(tensor.links)
    return program // programs, program % programs, tl.cdiv(rows, rows_per_program)


@triton.jit
def _locate_rows(tensor, link, number, tile, sends: tl.constexpr):
    """Return where the rows of a tile are.

    Args:
        tensor: the tensor.
        link: link of the rows.
        number: number of the program among those of the link whose rows are sent, or are not.
        tile: number of the tile in the program.
        sends: whether the rows are sent.

    Returns:
        Index of each row among those of the link that are sent, or are not; whether it exists; its group, head and
        first token; and the offset of its first value in a reference.
    """
    row_tokens: tl.constexpr = tensor.code.row_tokens
    block_rows: tl.constexpr = tensor.code.block_rows
    index = tl.arange(0, block_rows)
    if tensor.code.is_across_rows:
        row = (number * block_rows + index) * tensor.code.tiles + tile
    else:
        row = (number * tensor.code.tiles + tile) * block_rows + index
    groups, heads, tokens = _size(tensor.groups), _size(tensor.heads), _size(tensor.tokens)
    sent = _size(tensor.active) // row_tokens
    of_head = sent if sends else tokens - sent
    pair = row // of_head
    group, head, position = pair // heads, pair % heads, row % of_head
    valid = pair < groups * heads
    token = position * row_tokens
    if tensor.order is not None:
        first = 0 if sends else sent
        order = tensor.order + (link * groups + group) * tokens
        token = tl.load(order + first + position, mask=valid, other=0)
    start = (link * groups * heads + pair).to(tl.int64) * tokens + token
    return row, valid, group, head, token, start * tensor.code.dim


@triton.jit
def _tokens(token, column, dim: tl.constexpr, row_tokens: tl.constexpr):
    """Return the token of each value of rows with these first tokens, and the value's index in the token."""
    if row_tokens == 1:
        of_value, inner = token[:, None], column
    else:
        of_value, inner = token[:, None] + (column // dim)[None, :], column % dim
    return of_value, inner


@triton.jit
def _row_start(slot, group, head, token, stride_slot, stride_group, stride_head, stride_token):
    """Return the offset of a token's values in a tensor of any strides."""
    group_start = slot.to(tl.int64) * stride_slot + group.to(tl.int64) * stride_group
    return group_start + head.to(tl.int64) * stride_head + token.to(tl.int64) * stride_token


@triton.jit
def _predict(reference, previous, offsets, inside, gain):
    """Return prediction, reference and last change of the reference, rounded to its type as PyTorch's operations are.

    Args:
        reference: link reference.
        previous: link reference of the step before; None to predict the reference itself.
        offsets: offsets of the values in both.
        inside: mask of the values that exist.
        gain: gain of the link in units of 1 / GAIN_STEPS.
    """
    current = tl.load(reference + offsets, mask=inside, other=0.0)
    predicted, change = current, current
    if previous is not None:
        before = tl.load(previous + offsets, mask=inside, other=0.0)
        change = (current.to(tl.float32) - before.to(tl.float32)).to(current.dtype)
        factor = (gain.to(tl.float32) / _GAIN_STEPS).to(current.dtype)
        step = (factor.to(tl.float32) * change.to(tl.float32)).to(current.dtype)
        predicted = (step.to(tl.float32) + current.to(tl.float32)).to(current.dtype)
    return predicted, current, change


@triton.jit
def _dequantize(level, width, predicted, middle: tl.constexpr):
    """Return the values that both ends decode from levels, added to their prediction."""
    return ((level.to(tl.float32) - middle) * width + predicted.to(tl.float32)).to(predicted.dtype)


@triton.jit
def _load_base(
    base, weight, link, group, head, token, inner, inside, stride_link, stride_group, stride_head, stride_token
):
    """Return values of a base times its weight, float32; `inner` are their indices in the tokens."""
    start = _row_start(link, group, head, token, stride_link, stride_group, stride_head, stride_token)
    return tl.load(base + start + inner, mask=inside, other=0.0).to(tl.float32) * weight


@triton.jit(do_not_specialize=["groups", "heads", "tokens", "local_start", "local_count"])
def _scores_kernel(
    values, reference, previous, gains, scores,
    groups, heads, tokens, local_start, local_count, stride_slot, stride_group, stride_head, stride_token,
    base, weight, stride_base_link, stride_base_group, stride_base_head, stride_base_token,
    dim: tl.constexpr, block_dim: tl.constexpr, block_tokens: tl.constexpr,
):  # fmt: skip
    """Compute the scores of some tokens of one group and link per program, over all heads.

    Args:
        values: (P, G, H, T, D).
        reference: link reference (L, G, H, T, D), contiguous.
        previous: link reference of the step before, of the same shape; None to predict the reference itself.
        gains: uint8 (L); not read without a previous reference.
        scores: float32 (L, G, T), written: squared distance to the prediction, summed over heads and dims.
        groups, heads, tokens: G, H and T.
        local_start, local_count: first slot of this rank, or L without local slots; number of local slots.
        stride_slot, stride_group, stride_head, stride_token: strides of the values.
        base: base (L, G, H, T, D) that is subtracted from the values, or None.
        weight: weight of the base, or None.
        stride_base_link, stride_base_group, stride_base_head, stride_base_token: strides of the base, or None.
        dim, block_dim: D, and D rounded up to a power of two.
        block_tokens: tokens per program.
    """
    blocks, column = tl.cdiv(tokens, block_tokens), tl.arange(0, block_dim)
    pair = tl.program_id(0) // blocks
    token = tl.program_id(0) % blocks * block_tokens + tl.arange(0, block_tokens)
    link, group = pair // groups, pair % groups
    slot = link + (link >= local_start) * local_count
    inside = (token < tokens)[:, None] & (column < dim)[None, :]
    gain = 0
    if previous is not None:
        gain = tl.load(gains + link)
    total = tl.zeros([block_tokens], tl.float32)
    for head in range(heads):
        offset = ((pair.to(tl.int64) * heads + head) * tokens + token)[:, None] * dim + column[None, :]
        start = _row_start(slot, group, head + 0 * token, token, stride_slot, stride_group, stride_head, stride_token)
        value = tl.load(values + start[:, None] + column[None, :], mask=inside, other=0.0)
        if base is not None:
            subtracted = _load_base(
                base, weight, link, group, head + 0 * token[:, None], token[:, None], column[None, :], inside,
                stride_base_link, stride_base_group, stride_base_head, stride_base_token,
            )  # fmt: skip
            value = (value.to(tl.float32) - subtracted).to(value.dtype)
        predicted, _, _ = _predict(reference, previous, offset, inside, gain)
        residual = (value.to(tl.float32) - predicted.to(tl.float32)).to(value.dtype).to(tl.float32)
        total += tl.sum(tl.where(inside, residual * residual, 0.0), 1)
    tl.store(scores + pair.to(tl.int64) * tokens + token, total, mask=token < tokens)


@triton.jit
def _zero_not_finite(values):
    """Return values with zeros in place of those that are not finite, which cannot be a reference."""
    return tl.where(tl.abs(values.to(tl.float32)) < float("inf"), values, 0.0).to(values.dtype)


@triton.jit
def _encode_kernel(tensors, scale_table, sums, energies, counters):
    """Encode tensors, and write their new references and the sums over their values.

    Args:
        tensors: a TensorArguments for each tensor.
        scale_table: scale of each code, float32 (256).
        sums: float32 (programs, 4): sums of each program.
        energies: float32 (number of tensors, 2), written: error energy and value energy.
        counters: int32 (number of tensors or more): zeros, and zeros again when the kernel ends.
    """
    first = 0
    for number in tl.static_range(len(tensors)):  # a variable for the tensor would hold no constants
        program = tl.program_id(0) - first  # the grid has one dim: CUDA limits the others to 65,535 programs
        if (program >= 0) & (program < _size(tensors[number].programs)):
            _encode_rows(tensors[number], program, scale_table, sums + 4 * tl.program_id(0))
            if tensors[number].reference is not None:
                _reduce_in_last_program(tensors[number], sums + 4 * first, energies + 2 * number, counters + number)
        first += _size(tensors[number].programs)


@triton.jit
def _encode_rows(tensor, program, scale_table, sums):
    """Encode the rows of a program, and write their new reference.

    Args:
        tensor: the tensor.
        program: index of the program among those of the tensor.
        scale_table: scale of each code, float32 (256).
        sums: float32 (4), written: error energy, value energy, numerator and denominator of the gain.
    """
    link, number, sending = _locate_program(tensor, program)
    if tensor.order is not None:
        if number < sending:
            _encode_tiles(tensor, link, number, scale_table, sums, True)
        else:
            _encode_tiles(tensor, link, number - sending, scale_table, sums, False)
    else:
        _encode_tiles(tensor, link, number, scale_table, sums, True)


@triton.jit
def _encode_tiles(tensor, link, number, scale_table, sums, sends: tl.constexpr):
    """Encode rows that are all sent, or predict rows none of which is; see :func:`_encode_rows`."""
    levels: tl.constexpr = tensor.code.levels
    per_byte: tl.constexpr = tensor.code.per_byte
    size: tl.constexpr = tensor.code.row_tokens * tensor.code.dim
    block: tl.constexpr = tensor.code.block
    block_rows: tl.constexpr = tensor.code.block_rows
    is_across_rows: tl.constexpr = tensor.code.is_across_rows
    slot = link + (link >= _size(tensor.local_start)) * _size(tensor.local_count)
    message = tensor.payload + slot.to(tl.int64) * tensor.stride_payload
    gain = 0
    if (tensor.previous is not None) or (tensor.gain_offset is not None):
        gain = tl.load(tensor.gains + link)
    if tensor.gain_offset is not None:  # every program of a link writes the same
        tl.store(message.to(tl.pointer_type(tl.uint8)) + _size(tensor.gain_offset), gain)
    column = tl.arange(0, block)
    packed, weight = tl.zeros([block_rows, block], tl.int32), 1
    error_energy, value_energy = tl.zeros([block_rows], tl.float32), tl.zeros([block_rows], tl.float32)
    numerator, denominator = tl.zeros([block_rows], tl.float32), tl.zeros([block_rows], tl.float32)
    if _CAN_DISABLE_LICM:  # hoisted invariants would take registers
        for tile in tl.range(tensor.tiles, disable_licm=True):
            level, error, energy, moved, changed = _encode_tile(
                tensor, slot, link, number, tile, message, gain, scale_table, sends
            )
            packed, weight = packed + level * weight, weight * levels
            error_energy, value_energy = error_energy + error, value_energy + energy
            numerator, denominator = numerator + moved, denominator + changed
    else:
        for tile in range(tensor.tiles):
            level, error, energy, moved, changed = _encode_tile(
                tensor, slot, link, number, tile, message, gain, scale_table, sends
            )
            packed, weight = packed + level * weight, weight * levels
            error_energy, value_energy = error_energy + error, value_energy + energy
            numerator, denominator = numerator + moved, denominator + changed
    if sends and is_across_rows:
        rows = _size(tensor.groups) * _size(tensor.heads) * (_size(tensor.active) // tensor.code.row_tokens)
        index = number * block_rows + tl.arange(0, block_rows)
        inside = (index < tl.cdiv(rows, per_byte))[:, None] & (column < size)[None, :]
        tl.store(message + index.to(tl.int64)[:, None] * size + column[None, :], packed.to(tl.uint8), mask=inside)
    if tensor.reference is not None:
        tl.store(sums, tl.sum(error_energy))
        tl.store(sums + 1, tl.sum(value_energy))
        tl.store(sums + 2, tl.sum(numerator))
        tl.store(sums + 3, tl.sum(denominator))


@triton.jit
def _encode_tile(tensor, slot, link, number, tile, message, gain, scale_table, sends: tl.constexpr):
    """Encode a tile, and write its new reference, its scales, and its levels unless bytes go across rows.

    Args:
        tensor: the tensor.
        slot, link: slot and link of the rows.
        number, tile: see :func:`_locate_rows`.
        message: pointer to the link's payload.
        gain: gain of the link in units of 1 / GAIN_STEPS.
        scale_table: scale of each code, float32 (256).
        sends: whether the rows are sent.

    Returns:
        Levels, int32 (rows, columns), and sums over each row, float32 (rows): error energy, value energy, numerator and
        denominator of the gain.
    """
    levels: tl.constexpr = tensor.code.levels
    size: tl.constexpr = tensor.code.row_tokens * tensor.code.dim
    column = tl.arange(0, tensor.code.block)
    level = tl.zeros([tensor.code.block_rows, tensor.code.block], tl.int32)
    errors, moved, changed = (
        tl.zeros([tensor.code.block_rows], tl.float32),
        tl.zeros([tensor.code.block_rows], tl.float32),
        tl.zeros([tensor.code.block_rows], tl.float32),
    )
    row, valid, group, head, first_token, start = _locate_rows(tensor, link, number, tile, sends)
    inside, offset = valid[:, None] & (column < size)[None, :], start[:, None] + column[None, :]
    token, inner = _tokens(first_token, column, tensor.code.dim, tensor.code.row_tokens)
    outer = _row_start(
        slot, group[:, None], head[:, None], token,
        tensor.stride_slot, tensor.stride_group, tensor.stride_head, tensor.stride_token,
    )  # fmt: skip
    value = tl.load(tensor.strided + outer + inner[None, :], mask=inside, other=0.0)
    exact = value.to(tl.float32)
    energy = tl.sum(exact * exact, 1)
    if tensor.base is not None:  # the value is the difference from here on
        subtracted = _load_base(
            tensor.base, tensor.weight, link, group[:, None], head[:, None], token, inner[None, :], inside,
            tensor.stride_base_link, tensor.stride_base_group, tensor.stride_base_head, tensor.stride_base_token,
        )  # fmt: skip
        value = (exact - subtracted).to(value.dtype)
    decoded = value
    if tensor.reference is not None:
        predicted, current, change = _predict(tensor.reference, tensor.previous, offset, inside, gain)
        decoded = predicted
        if tensor.previous is not None:  # before the values are quantized, so that fewer registers are in use
            sampled, delta = inside & (token % _size(tensor.stride_sample) == 0), change.to(tl.float32)
            difference = value.to(tl.float32) - current.to(tl.float32)
            moved = tl.sum(tl.where(sampled, difference * delta, 0.0), 1)
            changed = tl.sum(tl.where(sampled, delta * delta, 0.0), 1)
    if sends:
        if levels:
            residual = (value.to(tl.float32) - predicted.to(tl.float32)).to(value.dtype).to(tl.float32)
            residual = tl.where(inside, residual, 0.0)
            level, code, width = _quantize(residual, scale_table, tensor.reference_norm, tensor.code)
            decoded = _dequantize(level, width, predicted, (levels - 1) / 2)
            level = tl.where(inside, level, 0)
            if not tensor.code.is_across_rows:
                _store_row_bytes(message, row, valid, level, size, levels, tensor.code.per_byte)
            tl.store(message + _size(tensor.scales_offset) + row, code.to(tl.uint8), mask=valid)
        else:
            tl.store(message + row.to(tl.int64)[:, None] * size + column[None, :], value, mask=inside)
            decoded = value
    if tensor.reference is not None:
        tl.store(tensor.new_reference + offset, decoded, mask=inside)
        error = (value.to(tl.float32) - decoded.to(tl.float32)).to(value.dtype).to(tl.float32)
        errors = tl.sum(tl.where(inside, error * error, 0.0), 1)
    else:
        tl.store(tensor.new_reference + offset, _zero_not_finite(value), mask=inside)
    return level, errors, energy, moved, changed


@triton.jit
def _quantize(residual, scale_table, reference_norm, how):
    """Return the level of each residual, and the code of the scale and the width of the levels of each row.

    Args:
        residual: float32 (rows, columns), 0 where there is no value.
        scale_table: scale of each code, float32 (256).
        reference_norm: see :class:`TensorArguments`.
        how: a Code.
    """
    levels: tl.constexpr = how.levels
    energy = tl.sum(residual * residual, 1)
    largest = tl.max(tl.abs(residual), 1)
    if how.by_maximum:
        code = tl.ceil(tl.log2(largest * reference_norm) * _PER_OCTAVE) + _ORIGIN
    else:
        scale = tl.maximum(tl.sqrt(energy) * reference_norm, largest * _PEAK_SHARE)
        code = tl.floor(tl.log2(scale) * _PER_OCTAVE + _ORIGIN + 0.5)
    code = tl.minimum(tl.maximum(code, 0.0), _NOT_FINITE - 1.0)
    code = tl.where(energy < float("inf"), code, _NOT_FINITE).to(tl.int32)
    width = tl.load(scale_table + code)[:, None] * how.level_width
    if levels > 6:
        level = tl.floor(tl.div_rn(residual, width))
        level = tl.where(level == level, level, 0.0) + levels // 2
        level = tl.minimum(tl.maximum(level, 0.0), levels - 1.0).to(tl.int32)
    else:  # the same result without a division: one comparison per edge between levels
        edge = tl.maximum(width, _MIN_WIDTH)
        level = tl.zeros(residual.shape, tl.int32)
        for number in tl.static_range(1, levels):
            level += (residual >= (number - levels / 2) * edge).to(tl.int32)
        level = tl.where((code == _NOT_FINITE)[:, None], levels // 2, level)
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
    if tl.atomic_add(counter, 1, sem="acq_rel") == _size(tensor.programs) - 1:
        tl.store(counter, 0)
        programs = _size(tensor.programs) // _size(tensor.links)
        index, field = tl.arange(0, _SUMS_BLOCK), tl.arange(0, 4)
        of_tensor = tl.zeros([4], tl.float32)
        for link in range(_size(tensor.links)):
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
                gain = tl.floor(numerator / denominator * _GAIN_STEPS + 0.5)
                gain = tl.where(gain == gain, tl.minimum(tl.maximum(gain, 0.0), _GAIN_STEPS), 0.0)
                tl.store(tensor.next_gains + link, gain.to(tl.uint8))
        tl.store(energies + field, of_tensor, mask=field < 2)


@triton.jit
def _decode_kernel(tensors, scale_table):
    """Decode tensors into their targets, and write their new references.

    Args:
        tensors: a TensorArguments for each tensor.
        scale_table: scale of each code, float32 (256).
    """
    first = 0
    for number in tl.static_range(len(tensors)):
        program = tl.program_id(0) - first
        if (program >= 0) & (program < _size(tensors[number].programs)):
            _decode_rows(tensors[number], program, scale_table)
        first += _size(tensors[number].programs)


@triton.jit
def _decode_rows(tensor, program, scale_table):
    """Decode the rows of a program into the new reference and the target; see :func:`_encode_rows`."""
    link, number, sending = _locate_program(tensor, program)
    if tensor.order is not None:
        if number < sending:
            _decode_tiles(tensor, link, number, scale_table, True)
        else:
            _decode_tiles(tensor, link, number - sending, scale_table, False)
    else:
        _decode_tiles(tensor, link, number, scale_table, True)


@triton.jit
def _decode_tiles(tensor, link, number, scale_table, sends: tl.constexpr):
    """Decode rows that were all sent, or predict rows none of which was."""
    levels: tl.constexpr = tensor.code.levels
    per_byte: tl.constexpr = tensor.code.per_byte
    size: tl.constexpr = tensor.code.row_tokens * tensor.code.dim
    block: tl.constexpr = tensor.code.block
    block_rows: tl.constexpr = tensor.code.block_rows
    is_across_rows: tl.constexpr = tensor.code.is_across_rows
    slot = link + (link >= _size(tensor.local_start)) * _size(tensor.local_count)
    message = tensor.payload + slot.to(tl.int64) * tensor.stride_payload
    gain = 0
    if tensor.gain_offset is not None:
        gain = tl.load(message.to(tl.pointer_type(tl.uint8)) + _size(tensor.gain_offset))
    elif tensor.previous is not None:
        gain = tl.load(tensor.gains + link)
    column = tl.arange(0, block)
    packed = tl.zeros([block_rows, block], tl.int32)
    if sends and is_across_rows:
        rows = _size(tensor.groups) * _size(tensor.heads) * (_size(tensor.active) // tensor.code.row_tokens)
        index = number * block_rows + tl.arange(0, block_rows)
        inside = (index < tl.cdiv(rows, per_byte))[:, None] & (column < size)[None, :]
        packed = tl.load(message + index.to(tl.int64)[:, None] * size + column[None, :], mask=inside, other=0)
        packed = packed.to(tl.int32)
    for tile in range(tensor.tiles):
        row, valid, group, head, first_token, start = _locate_rows(tensor, link, number, tile, sends)
        inside, offset = valid[:, None] & (column < size)[None, :], start[:, None] + column[None, :]
        if tensor.reference is not None:
            predicted, _, _ = _predict(tensor.reference, tensor.previous, offset, inside, gain)
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
                code = tl.load(message + _size(tensor.scales_offset) + row, mask=valid, other=0).to(tl.int32)
                width = tl.load(scale_table + code)[:, None] * tensor.code.level_width
                decoded = _dequantize(level, width, predicted, (levels - 1) / 2)
            else:
                decoded = tl.load(message + row.to(tl.int64)[:, None] * size + column[None, :], mask=inside, other=0.0)
        if tensor.reference is not None:
            tl.store(tensor.new_reference + offset, decoded, mask=inside)
        else:
            tl.store(tensor.new_reference + offset, _zero_not_finite(decoded), mask=inside)
        token, inner = _tokens(first_token, column, tensor.code.dim, tensor.code.row_tokens)
        outer = _row_start(
            slot, group[:, None], head[:, None], token,
            tensor.stride_slot, tensor.stride_group, tensor.stride_head, tensor.stride_token,
        )  # fmt: skip
        if tensor.base is not None:
            added = _load_base(
                tensor.base, tensor.weight, link, group[:, None], head[:, None], token, inner[None, :], inside,
                tensor.stride_base_link, tensor.stride_base_group, tensor.stride_base_head, tensor.stride_base_token,
            )  # fmt: skip
            decoded = (added + decoded.to(tl.float32)).to(decoded.dtype)
        tl.store(tensor.strided + outer + inner[None, :], decoded, mask=inside)


@triton.jit(do_not_specialize=["stride_mask", "tokens", "active"])
def _order_kernel(mask, order, stride_mask, tokens, active, block: tl.constexpr):
    """Write the active tokens of a group and then the others, each ascending; a program has a group.

    Args:
        mask: uint8 (groups, tokens or more); 1 marks an active token.
        order: int32 (groups, tokens), written.
        stride_mask: stride of the mask's groups.
        tokens, active: number of tokens, and of active ones, per group.
        block: number of tokens that are read at once.
    """
    group, sent = tl.program_id(0), 0
    for first in range(0, tokens, block):
        token = first + tl.arange(0, block)
        is_active = tl.load(mask + group * stride_mask + token, mask=token < tokens, other=0).to(tl.int32)
        before = sent + tl.cumsum(is_active, 0) - is_active  # active tokens before this one
        position = tl.where(is_active > 0, before, active + token - before)
        tl.store(order + group * tokens + position, token, mask=token < tokens)
        sent += tl.sum(is_active, 0)
