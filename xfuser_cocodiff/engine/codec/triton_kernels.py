"""The Triton backend of the kernels, for accelerators: one launch a message, which reads and writes each tensor once.

:mod:`xfuser_cocodiff.engine.codec` documents the functions, :mod:`triton_tensors` the arguments of the kernels.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from xfuser_cocodiff.engine.codec import quantize
from xfuser_cocodiff.engine.codec.rows import (
    GAIN_BYTES,
    EncodeResult,
    Int8Rows,
    MessagePart,
    num_links,
    rows_of,
    sample_stride,
)
from xfuser_cocodiff.engine.codec.triton_decoder import decode_kernel
from xfuser_cocodiff.engine.codec.triton_encoder import encode_kernel
from xfuser_cocodiff.engine.codec.triton_tensors import RowShape, TensorArguments, size_of, unspecialized
from xfuser_cocodiff.engine.topology import devices

_TILE_BYTES = 2048
"""Maximum size of the values that a program processes at once: 16 bytes for each of its threads."""
_MAX_TENSORS = 64
"""Maximum number of tensors in a launch: Q, K, V and O of many branches."""
_LAUNCH_OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}
"""Four warps leave 16 bytes of a tile to each thread."""
_MAX_REGISTERS = 64
"""Maximum number of registers of a thread on NVIDIA GPUs, which leaves half of the warps resident."""


def encode(parts: Sequence[MessagePart]) -> list[EncodeResult]:
    """Encode the tensors of a message and write their payloads; see the package."""
    assert len(parts) <= _MAX_TENSORS
    tensors, shapes = tuple(map(_sender_arguments, parts)), _shapes(parts)
    device, programs = parts[0].values.device, _num_programs(tensors)
    sums, energies = (
        torch.empty(shape, dtype=torch.float32, device=device) for shape in ((programs, 4), (len(parts), 2))
    )
    counters = _counters(device, _current_stream(device))
    try:
        encode_kernel[(programs,)](tensors, shapes, _tables(device), sums, energies, counters, **_launch_options())
    except BaseException:
        _counters.cache_clear()  # programs may have counted
        raise
    return [
        EncodeResult(Int8Rows(tensor.new_reference, tensor.new_codes), of_part[0], of_part[1], tensor.next_gains)
        for tensor, of_part in zip(tensors, energies.unbind(), strict=True)
    ]


def decode(parts: Sequence[MessagePart]) -> list[Int8Rows]:
    """Decode the payloads of a message into its targets and return the new link references; see the package."""
    targets = [part.values for part in parts]
    written = [each if each.stride(-1) == 1 else torch.empty_like(each).contiguous() for each in targets]
    tensors = tuple(map(_arguments, parts, written))
    decode_kernel[(_num_programs(tensors),)](tensors, _shapes(parts), _tables(targets[0].device), **_launch_options())
    for part, target in zip(parts, written, strict=True):
        if target is not part.values:
            local = part.local_slots or range(0)
            for remote in (slice(0, local.start), slice(local.stop, None)):
                part.values[remote].copy_(target[remote])
    return [Int8Rows(tensor.new_reference, tensor.new_codes) for tensor in tensors]


def _sender_arguments(part: MessagePart) -> TensorArguments:
    """Return the encoder's arguments for a tensor."""
    arguments, grid = _arguments(part, _with_contiguous_rows(part.values)), quantize.GRIDS[part.bits]
    gains = None
    if arguments.previous is not None:
        gains = torch.empty(len(arguments.new_codes), dtype=torch.uint8, device=part.values.device)
    norm = arguments.new_reference.shape[-1] ** -0.5
    how = (0.0, 1 / grid.reach, 1.0) if grid.by_maximum else (norm, quantize.PEAK_SHARE, 0.5)
    return arguments._replace(
        next_gains=gains,
        **dict(zip(("norm_weight", "peak_weight", "rounding"), how, strict=True)),
        stride_sample=unspecialized(sample_stride(part.values.shape[3])),
    )


def _arguments(part: MessagePart, values: torch.Tensor) -> TensorArguments:
    """Return the kernels' arguments for a tensor, with memory for its new reference.

    Args:
        part: the tensor.
        values: its values or target, (P, G, H, T, D) with D contiguous.

    Raises:
        ValueError: the bytes of a slot's payload are not contiguous.
    """
    slots, groups, heads, tokens, _ = values.shape
    links, (rows, size) = num_links(slots, part.local_slots), rows_of(values.shape)
    payload, grid, prediction = part.payload, quantize.GRIDS[part.bits], part.prediction
    if payload.stride(-1) != 1:
        raise ValueError(f"the bytes of a payload must be contiguous; its strides are {payload.stride()}")
    units = -(-rows // grid.per_unit)
    programs = triton.cdiv(units, _row_shape_of(values).block_rows.value)
    base = None if part.base is None else _with_contiguous_rows(part.base)
    fields: tuple[Any, ...] = (
        *(values, *values.stride()[:4]),
        *((None,) * 5 if base is None else (base, *base.stride()[:4])),
        *(prediction.reference or (None, None)),
        *(prediction.previous or (None, None)),
        *(prediction.gains, payload, payload.stride(0), unspecialized(quantize.level_bytes(part.bits, rows, size))),
        unspecialized(payload.shape[1] - GAIN_BYTES) if part.sends_gain else None,
        torch.empty(links, rows, size, dtype=torch.int8, device=values.device),
        torch.empty(links, rows, dtype=torch.uint8, device=values.device),
        *map(unspecialized, (links, groups, heads, tokens, *_local_arguments(part.local_slots, links))),
        *map(unspecialized, (links * programs, grid.levels, grid.per_unit)),
        *(grid.width, 1 / grid.levels),
    )
    return TensorArguments(*fields)


@functools.cache
def _launch_options() -> dict[str, Any]:
    """Return the launch options; only Triton's backend for NVIDIA GPUs can limit registers."""
    with contextlib.suppress(RuntimeError):  # there is no driver where kernels are interpreted
        if driver.active.get_current_target().backend == "cuda":
            return {**_LAUNCH_OPTIONS, "maxnreg": _MAX_REGISTERS}
    return _LAUNCH_OPTIONS


def _num_programs(tensors: Sequence[TensorArguments]) -> int:
    """Return the number of programs of a launch."""
    return sum(size_of(tensor.programs) for tensor in tensors)


def _shapes(parts: Sequence[MessagePart]) -> tuple[RowShape, ...]:
    """Return the constants of the compiler for a message."""
    return tuple(_row_shape_of(part.values) for part in parts)


def _row_shape_of(values: torch.Tensor) -> RowShape:
    """Return the shape of rows and tiles of values (P, G, H, T, D)."""
    *_, tokens, dim = values.shape
    return _row_shape(dim, quantize.tokens_per_row(dim, tokens), values.itemsize)


@functools.lru_cache(maxsize=1024)  # for every tensor of every message
def _row_shape(dim: int, row_tokens: int, value_bytes: int) -> RowShape:
    """Return the shape of rows and tiles, the same object for equal arguments."""
    block = triton.next_power_of_2(row_tokens * dim)
    fields = dim, row_tokens, block, max(1, _TILE_BYTES // value_bytes // block)
    return RowShape(*map(tl.constexpr, fields))


@functools.cache  # created once, since copying them to a device blocks the host
def _tables(device: torch.device) -> torch.Tensor:
    """Return the tables of scales, see :func:`triton_reference.store_reference`, float32 (3 * 256)."""
    tables = quantize.scale_table, quantize.int8_widths, quantize.int8_inverses
    return torch.cat([table(device) for table in tables])


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
