"""The Triton backend of the kernels, for accelerators: one launch a message, which reads and writes each tensor once.

:mod:`kernels` documents the functions, :mod:`triton_tensors` the arguments of the kernels.
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
from xfuser_cocodiff.engine.codec.memory import lasting
from xfuser_cocodiff.engine.codec.rows import MessagePart, PayloadLayout, num_links, rows_of, sample_stride
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


def encode(parts: Sequence[MessagePart], energies: torch.Tensor) -> None:
    """Encode the tensors of a message and write their payloads; see :mod:`kernels`."""
    assert len(parts) <= _MAX_TENSORS
    tensors, shapes = _arguments(parts, [_with_contiguous_rows(part.values) for part in parts])
    device, programs = energies.device, _num_programs(tensors)
    scratch = _scratch(device, _current_stream(device))
    try:
        encode_kernel[(programs,)](
            tensors, shapes, _tables(device), scratch.sums(programs), energies, scratch.counters, **_launch_options()
        )
    except BaseException:
        _scratch.cache_clear()  # programs may have counted
        raise


def decode(parts: Sequence[MessagePart]) -> None:
    """Decode the payloads of a message into its targets; see :mod:`kernels`."""
    tensors, shapes = _arguments(parts, [part.values for part in parts])
    decode_kernel[(_num_programs(tensors),)](tensors, shapes, _tables(parts[0].values.device), **_launch_options())


def _arguments(
    parts: Sequence[MessagePart], values: Sequence[torch.Tensor]
) -> tuple[tuple[TensorArguments, ...], tuple[RowShape, ...]]:
    """Return the kernels' arguments for the tensors of a message, and the constants of the compiler.

    Args:
        parts: the tensors.
        values: their values or targets, (P, G, H, T, D) each.

    Raises:
        ValueError: the values of a token, or the bytes of a slot's payload, are not contiguous.
    """
    tensors, shapes = [], []
    for part, data in zip(parts, values, strict=True):
        prediction, strides, (slot_stride, byte_stride) = part.prediction, data.stride(), part.payload.stride()
        if strides[-1] != 1 or byte_stride != 1:
            raise ValueError(f"the last dims must be contiguous; strides are {strides} and {part.payload.stride()}")
        base = None if part.base is None else _with_contiguous_rows(part.base)
        sizes, shape = _sizes(data.shape, data.itemsize, part.local_slots, part.bits, part.sends_gain)
        fields = (
            *(data, *strides[:4]),
            *((None,) * 5 if base is None else (base, *base.stride()[:4])),
            *(prediction.reference or (None, None)),
            *(prediction.previous or (None, None)),
            *(prediction.gains, part.payload, slot_stride),
            *part.new_reference,
            *sizes,
        )
        tensors.append(TensorArguments._make(fields))
        shapes.append(shape)
    return tuple(tensors), tuple(shapes)


@functools.lru_cache(maxsize=4096)  # for every tensor of every message
def _sizes(
    shape: tuple[int, ...], value_bytes: int, local_slots: range | None, bits: float, sends_gain: bool
) -> tuple[tuple, RowShape]:
    """Return what the kernels' arguments have besides tensors and strides, and the constants of the compiler.

    Args:
        shape: (P, G, H, T, D).
        value_bytes: bytes of a value.
        local_slots: slots of this rank.
        bits: bits per value.
        sends_gain: whether the payload ends with a gain.
    """
    slots, groups, heads, tokens, dim = shape
    links, (rows, size), grid = num_links(slots, local_slots), rows_of(shape), quantize.GRIDS[bits]
    layout = PayloadLayout.of(bits, rows, size, sends_gain)
    row_shape = _row_shape(dim, quantize.tokens_per_row(dim, tokens), value_bytes)
    programs = links * triton.cdiv(-(-rows // grid.per_unit), row_shape.block_rows.value)
    first_local = (links, 0) if local_slots is None else (local_slots.start, len(local_slots))
    scale = (0.0, 1 / grid.reach, 1.0) if grid.by_maximum else (size**-0.5, quantize.PEAK_SHARE, 0.5)
    sizes = (
        *(unspecialized(layout.scales), unspecialized(layout.gain) if sends_gain else None),
        *map(unspecialized, (links, groups, heads, tokens, *first_local, programs, grid.levels, grid.per_unit)),
        *(grid.width, 1 / grid.levels, *scale, unspecialized(sample_stride(tokens))),
    )
    return sizes, row_shape


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


@functools.cache
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


class _Scratch:
    """Memory of the encoder's launches on a stream, which follow each other.

    Args:
        device: where it is.
    """

    def __init__(self, device: torch.device) -> None:
        self.counters = lasting((_MAX_TENSORS,), torch.int32, device).zero_()
        """Counters of ended programs: each launch leaves zeros."""
        self._sums = lasting((0, 4), torch.float32, device)

    def sums(self, programs: int) -> torch.Tensor:
        """Return memory for the sums of each program, float32 (programs or more, 4)."""
        if len(self._sums) < programs:
            self._sums = lasting((programs, 4), torch.float32, self._sums.device)
        return self._sums


@functools.cache  # launches on two streams must not share counters
def _scratch(device: torch.device, stream: "torch.Stream | None") -> _Scratch:
    return _Scratch(device)


def _with_contiguous_rows(values: torch.Tensor) -> torch.Tensor:
    """Return values whose last dim is contiguous, as a copy if need be."""
    return values if values.stride(-1) == 1 else values.contiguous()
