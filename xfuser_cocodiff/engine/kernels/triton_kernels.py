"""The Triton backend of the kernels, for accelerators: one launch a message, which reads and writes each tensor once.

:mod:`xfuser_cocodiff.engine.kernels` documents the functions, :mod:`triton_tensors` the arguments of the kernels.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from xfuser_cocodiff.engine.kernels import quantize
from xfuser_cocodiff.engine.kernels.rows import (
    GAIN_BYTES,
    ActiveTokens,
    Base,
    EncodeResult,
    MessagePart,
    Prediction,
    num_links,
    remote_slots,
    sample_stride,
    view_bytes,
    write_remote_slots,
)
from xfuser_cocodiff.engine.kernels.triton_decoder import decode_kernel
from xfuser_cocodiff.engine.kernels.triton_encoder import encode_kernel
from xfuser_cocodiff.engine.kernels.triton_selection import order_kernel, scores_kernel
from xfuser_cocodiff.engine.kernels.triton_tensors import CodecConstants, TensorArguments, size_of, unspecialized
from xfuser_cocodiff.engine.topology import devices

_TILE_BYTES = 2048
"""Maximum size of the values that a program processes at once: 16 bytes for each of its threads."""
_TILES = 4
"""Number of tiles of a program, unless the values of a byte are of more or fewer rows."""
_ORDER_BLOCK = 1024
"""Number of tokens that the ordering of a selection reads at once."""
_MAX_TENSORS = 64
"""Maximum number of tensors in a launch: Q, K, V and O of many branches."""
_LAUNCH_OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}
"""Four warps leave 16 bytes of a tile to each thread."""
_MAX_REGISTERS = 64
"""Maximum number of registers of a thread of the encoder on NVIDIA GPUs, which leaves half of the warps resident."""


def scores(
    values: torch.Tensor, prediction: Prediction, local_slots: range | None, base: Base | None = None
) -> torch.Tensor:
    """Return the squared distance of each token from its prediction; see the package."""
    values, reference = _with_contiguous_rows(values), prediction.reference
    links, groups, heads, tokens, dim = reference.shape
    found = torch.empty(links, groups, tokens, device=values.device)
    block_dim = triton.next_power_of_2(dim)
    block = max(1, _TILE_BYTES // values.itemsize // block_dim)
    scores_kernel[(links * groups * triton.cdiv(tokens, block),)](
        values, reference, prediction.previous, prediction.gains, found,
        groups, heads, tokens, *_local_arguments(local_slots, links), *values.stride()[:4],
        *_base_arguments(base), dim, block_dim, block, **_LAUNCH_OPTIONS,
    )  # fmt: skip
    return found


def encode_all(parts: Sequence[MessagePart]) -> list[EncodeResult]:
    """Encode the tensors of a message and write their payloads; see the package."""
    assert len(parts) <= _MAX_TENSORS
    tensors, codecs = zip(*map(_sender_arguments, parts), strict=True)
    device, programs = parts[0].values.device, _num_programs(tensors)
    sums, energies = torch.empty(programs, 4, device=device), torch.empty(len(parts), 2, device=device)
    counters = _counters(device, _current_stream(device))
    try:
        scale_table = quantize.scale_table(device)
        encode_kernel[(programs,)](tensors, codecs, scale_table, sums, energies, counters, **_encoder_options())
    except BaseException:
        _counters.cache_clear()  # programs may have counted
        raise
    figures = energies.flatten().unbind()
    return [
        EncodeResult(tensor.new_reference)
        if part.prediction is None
        else EncodeResult(tensor.new_reference, figures[2 * number], figures[2 * number + 1], tensor.next_gains)
        for number, (part, tensor) in enumerate(zip(parts, tensors, strict=True))
    ]


def decode_all(parts: Sequence[MessagePart]) -> list[torch.Tensor]:
    """Decode the payloads of a message into its targets and return the new link references; see the package."""
    targets = [part.values for part in parts]
    written = [each if each.stride(-1) == 1 else torch.empty_like(each).contiguous() for each in targets]
    tensors, codecs = zip(*map(_arguments, parts, written), strict=True)
    scale_table = quantize.scale_table(targets[0].device)
    decode_kernel[(_num_programs(tensors),)](tensors, codecs, scale_table, **_LAUNCH_OPTIONS)
    for part, each in zip(parts, written, strict=True):
        if each is not part.values:
            write_remote_slots(part.values, remote_slots(each, part.local_slots), part.local_slots)
    return [tensor.new_reference for tensor in tensors]


def encode(*fields: Any, **named: Any) -> EncodeResult:
    """Encode a single tensor, given as the fields of its MessagePart."""
    return encode_all([MessagePart(*fields, **named)])[0]


def decode(
    payload: torch.Tensor,
    prediction: Prediction | None,
    bits: float | None,
    active: ActiveTokens | None,
    target: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> torch.Tensor:
    """Decode a single tensor, given as the fields of its MessagePart."""
    return decode_all([MessagePart(target, prediction, bits, active, payload, *rest, **named)])[0]


def _sender_arguments(part: MessagePart) -> tuple[TensorArguments, CodecConstants]:
    """Return the encoder's arguments for a tensor."""
    (arguments, codec), grid = _arguments(part, _with_contiguous_rows(part.values)), _grid(part.bits)
    size = codec.row_tokens.value * part.values.shape[-1]
    gains = None
    if arguments.previous is not None:
        gains = torch.empty(len(arguments.new_reference), dtype=torch.uint8, device=part.values.device)
    arguments = arguments._replace(
        next_gains=gains,
        reference_norm=1 / grid.reach if grid.by_maximum else size**-0.5,
        stride_sample=unspecialized(sample_stride(part.values.shape[3])),
    )
    return arguments, codec


def _arguments(part: MessagePart, values: torch.Tensor) -> tuple[TensorArguments, CodecConstants]:
    """Return the kernels' arguments for a tensor, with memory for its new reference.

    Args:
        part: the tensor.
        values: its values or target, (P, G, H, T, D) with D contiguous.

    Raises:
        ValueError: the bytes of a slot's payload are not contiguous.
    """
    slots, groups, heads, tokens, dim = values.shape
    links = num_links(slots, part.local_slots)
    payload, bits, active = part.payload, part.bits, part.active
    if payload.stride(-1) != 1:
        raise ValueError(f"the bytes of a payload must be contiguous; its strides are {payload.stride()}")
    sent = tokens if active is None else active.count
    row_tokens = 1 if bits is None else quantize.tokens_per_row(bits, dim, tokens, active is None)
    codec, pairs = _codec(bits, dim, row_tokens, _TILE_BYTES // values.itemsize), groups * heads
    gain_offset = payload.shape[1] - GAIN_BYTES if part.sends_gain else None
    payload = view_bytes(payload, values.dtype) if bits is None else payload
    rows, program_rows = pairs * sent // row_tokens, codec.block_rows.value * codec.tiles.value
    offset = 0 if bits is None else quantize.level_bytes(bits, rows, row_tokens * dim)
    programs = -(-rows // program_rows) - (-pairs * (tokens - sent) // program_rows)  # triton.cdiv takes 2 us
    prediction = part.prediction or (None, None, None, None)
    fields: tuple[Any, ...] = (
        values, *values.stride()[:4], *_base_arguments(part.base), *prediction,
        None if active is None else _order(active), payload, payload.stride(0), unspecialized(offset),
        None if gain_offset is None else unspecialized(gain_offset),
        values.new_empty(links, groups, heads, tokens, dim),
        *map(unspecialized, (links, groups, heads, tokens, sent, *_local_arguments(part.local_slots, links))),
        unspecialized(links * programs), codec.tiles.value,
    )  # fmt: skip
    return TensorArguments(*fields), codec


@functools.cache
def _encoder_options() -> dict[str, Any]:
    """Return the launch options of the encoder; only Triton's backend for NVIDIA GPUs can limit registers."""
    with contextlib.suppress(RuntimeError):  # there is no driver where kernels are interpreted
        if driver.active.get_current_target().backend == "cuda":
            return {**_LAUNCH_OPTIONS, "maxnreg": _MAX_REGISTERS}
    return _LAUNCH_OPTIONS


def _num_programs(tensors: Sequence[TensorArguments]) -> int:
    """Return the number of programs of a launch."""
    return sum(size_of(tensor.programs) for tensor in tensors)


@functools.lru_cache(maxsize=1024)  # for every tensor of every message
def _codec(bits: float | None, dim: int, row_tokens: int, tile_values: int) -> CodecConstants:
    """Return how rows of some tokens are encoded.

    Args:
        bits: bits per value; None to send values unchanged.
        dim: D.
        row_tokens: tokens per row.
        tile_values: maximum number of values of a tile.
    """
    grid, block = _grid(bits), triton.next_power_of_2(row_tokens * dim)
    tiles = grid.per_byte if grid.is_across_rows else _TILES
    fields = (
        *grid, grid.by_maximum, dim, row_tokens, grid.is_across_rows, block, max(1, tile_values // block), tiles,
        *_SCALES, torch.finfo(torch.float32).tiny,
    )  # fmt: skip
    return CodecConstants(*map(tl.constexpr, fields))


def _order(active: ActiveTokens) -> torch.Tensor:
    """Return the active tokens and then the others of each group, int32 (L, G, T), ordered once for all tensors."""
    if active.order is None:
        links, groups, _ = active.mask.shape
        active.order = torch.empty(links, groups, active.tokens, dtype=torch.int32, device=active.mask.device)
        mask = active.mask.flatten(0, 1)
        order_kernel[(links * groups,)](
            mask, active.order, mask.stride(0), active.tokens, active.count, _ORDER_BLOCK, **_LAUNCH_OPTIONS
        )
    return active.order


_SCALES = float(quantize.PER_OCTAVE), float(quantize.ORIGIN), float(quantize.NOT_FINITE), quantize.PEAK_SHARE
_NO_GRID = quantize.Grid(0, 1, 0.0)
"""Grid of values that are sent unchanged."""


def _grid(bits: float | None) -> quantize.Grid:
    """Return the grid for bits per value, or that of unchanged values for None."""
    return _NO_GRID if bits is None else quantize.GRIDS[bits]


def _current_stream(device: torch.device) -> "torch.Stream | None":
    """Return the stream that kernels are launched on; None on a CPU, which has none."""
    return torch.accelerator.current_stream(device) if devices.capabilities(device.type).is_asynchronous else None


@functools.cache
def _counters(device: torch.device, stream: "torch.Stream | None") -> torch.Tensor:
    """Return the counters of the encoder's launches on a stream, zeros int32.

    Launches on one stream follow each other, and each leaves zeros. Those on two streams must not share counters.
    """
    return torch.zeros(_MAX_TENSORS, dtype=torch.int32, device=device)


def _with_contiguous_rows(values: torch.Tensor) -> torch.Tensor:
    """Return values whose last dim is contiguous, as a copy if need be."""
    return values if values.stride(-1) == 1 else values.contiguous()


def _local_arguments(local_slots: range | None, links: int) -> tuple[int, int]:
    """Return the kernels' arguments `local_start` and `local_count`."""
    return (links, 0) if local_slots is None else (local_slots.start, len(local_slots))


_NO_BASE = (None,) * 6
"""The kernels' arguments without a base. Triton compiles None as a constant, so that the code has no trace of them."""


def _base_arguments(base: Base | None) -> tuple[torch.Tensor | float | int | None, ...]:
    """Return the kernels' arguments from `base` to `stride_base_token`."""
    if base is None:
        return _NO_BASE
    values = _with_contiguous_rows(base.values)
    return values, float(base.weight), *values.stride()[:4]
