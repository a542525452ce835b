"""The Numba backend of the kernels, for CPUs: it reads and writes each tensor once.

:mod:`xfuser_cocodiff.engine.kernels` documents the functions. Values that are sent unchanged need no arithmetic, and
half precision other than bfloat16 is rare on CPUs: the PyTorch backend handles both, and its payloads are the same.
"""

import functools
import itertools
import math
import os
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from xfuser_cocodiff.engine.kernels import numba_loops, quantize, torch_kernels
from xfuser_cocodiff.engine.kernels.numba_loops import NO_BASE, BaseRows, EncodingLayout
from xfuser_cocodiff.engine.kernels.rows import (
    GAIN_BYTES,
    ActiveTokens,
    Base,
    EncodeResult,
    Prediction,
    num_links,
    sample_stride,
)
from xfuser_cocodiff.engine.topology.devices import CPU

_TYPED_ZEROS = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
"""A zero of the type in which the loops access values of each dtype in memory."""
_VALUES_PER_THREAD = 2**17
"""Number of values that make up for the start of another thread."""


@functools.cache
def prepare() -> None:
    """Compile all loops, or load them from Numba's cache, so that the first call need not."""
    for dtype in _TYPED_ZEROS:
        values = torch.zeros(1, 1, 1, 1, 64, dtype=dtype)
        prediction = Prediction(values, values, torch.zeros(1, dtype=torch.uint8))
        payload = torch.zeros(1, quantize.level_bytes(2, 1, 64) + 1, dtype=torch.uint8)
        scores(values, prediction, None)
        encode(values, prediction, 2, None, payload, None)
        decode(payload, prediction, 2, None, torch.empty_like(values), None)


def scores(
    values: torch.Tensor, prediction: Prediction, local_slots: range | None, base: Base | None = None
) -> torch.Tensor:
    """Return the squared distance of each token from its prediction; see the package."""
    if values.dtype not in _TYPED_ZEROS:
        return torch_kernels.scores(values, prediction, local_slots, base)
    values, base = _with_contiguous_rows(values), _with_contiguous_base(base)
    links, groups, heads, tokens, _ = prediction.reference.shape
    _check(values, prediction, local_slots)
    layout = _layout(values, local_slots, None, None)
    found = torch.empty(links, groups, tokens, dtype=torch.float32, device=CPU)
    _in_threads(
        numba_loops.score, links * groups, heads * tokens, (1, 1), layout, _TYPED_ZEROS[values.dtype],
        values.data_ptr(), _base_rows(base), *_addresses(prediction), found.data_ptr(),
    )  # fmt: skip
    return found


def encode(
    values: torch.Tensor,
    prediction: Prediction | None,
    bits: float | None,
    active: ActiveTokens | None,
    payload: torch.Tensor,
    local_slots: range | None,
    sends_gain: bool = False,
    base: Base | None = None,
) -> EncodeResult:
    """Encode values and write the payload; see the package."""
    if prediction is None or bits is None or values.dtype not in _TYPED_ZEROS:
        return torch_kernels.encode(values, prediction, bits, active, payload, local_slots, sends_gain, base)
    values, base, grid = _with_contiguous_rows(values), _with_contiguous_base(base), quantize.GRIDS[bits]
    links, groups, heads, tokens, dim = prediction.reference.shape
    layout = _layout(values, local_slots, bits, active, payload, sends_gain and prediction.gains is not None)
    _check(values, prediction, local_slots)
    reference = torch.empty_like(prediction.reference)
    sums = torch.empty(links, groups, heads, 4, dtype=torch.float64, device=CPU)
    energies = torch.empty(2, dtype=torch.float32, device=CPU)
    gains = None if prediction.previous is None else torch.empty(links, dtype=torch.uint8, device=CPU)
    reference_norm = grid.reach if grid.by_maximum else (layout.row_tokens * dim) ** -0.5
    _in_threads(
        numba_loops.encode, links * groups * heads, tokens * dim, _unit(layout),
        layout, _TYPED_ZEROS[values.dtype], np.float32(reference_norm), grid.by_maximum, sample_stride(tokens),
        values.data_ptr(), _base_rows(base), *_addresses(prediction), _address(prediction.channel_scales),
        _address(active and active.positions), quantize.scale_table(CPU).data_ptr(),
        payload.data_ptr(), reference.data_ptr(), sums.data_ptr(),
    )  # fmt: skip
    numba_loops.reduce_sums(sums.data_ptr(), links, groups * heads, energies.data_ptr(), _address(gains))
    error_energy, value_energy = energies.unbind()
    return EncodeResult(reference, error_energy, value_energy, gains)


def decode(
    payload: torch.Tensor,
    prediction: Prediction | None,
    bits: float | None,
    active: ActiveTokens | None,
    target: torch.Tensor,
    local_slots: range | None,
    sends_gain: bool = False,
    base: Base | None = None,
) -> torch.Tensor:
    """Decode a payload into the target and return the new link reference; see the package."""
    if prediction is None or bits is None or target.dtype not in _TYPED_ZEROS or target.stride(-1) != 1:
        return torch_kernels.decode(payload, prediction, bits, active, target, local_slots, sends_gain, base)
    base = _with_contiguous_base(base)
    links, groups, heads, tokens, dim = prediction.reference.shape
    _check(target, prediction, local_slots)
    layout = _layout(target, local_slots, bits, active, payload, sends_gain)
    reference = torch.empty_like(prediction.reference)
    _in_threads(
        numba_loops.decode, links * groups * heads, tokens * dim, _unit(layout), layout, _TYPED_ZEROS[target.dtype],
        payload.data_ptr(), _base_rows(base), *_addresses(prediction), _address(prediction.channel_scales),
        _address(active and active.positions), quantize.scale_table(CPU).data_ptr(),
        reference.data_ptr(), target.data_ptr(),
    )  # fmt: skip
    return reference


def _check(values: torch.Tensor, prediction: Prediction, local_slots: range | None) -> None:
    """Check that a prediction fits the values, since the loops see addresses only.

    Raises:
        ValueError: another shape or type, or a reference or scales that are not contiguous.
    """
    shape = num_links(values.shape[0], local_slots), *values.shape[1:]
    for each in (prediction.reference, *([] if prediction.previous is None else [prediction.previous])):
        if each.shape != shape or each.dtype != values.dtype or not each.is_contiguous():
            raise ValueError(f"references of {tuple(each.shape)} {each.dtype} for values of {shape} {values.dtype}")
    links, _, heads, _, dim = shape
    scales = prediction.channel_scales
    if scales is not None and not (
        scales.shape == (links, heads, dim) and scales.dtype == torch.float32 and scales.is_contiguous()
    ):
        raise ValueError(f"scales of channels of {tuple(scales.shape)} {scales.dtype} for values of {shape}")


def _layout(
    values: torch.Tensor,
    local_slots: range | None,
    bits: float | None,
    active: ActiveTokens | None,
    payload: torch.Tensor | None = None,
    sends_gain: bool = False,
) -> EncodingLayout:
    """Return where the loops find values (P, G, H, T, D) and the sections of their payload.

    Args:
        values: read by the encoder, or written by the decoder.
        local_slots: slots of this rank; None for none.
        bits: bits per value; None if nothing is encoded.
        active: tokens that are sent; None for all.
        payload: uint8 (P, n); None if nothing is encoded.
        sends_gain: whether the payload ends with the gain.

    Raises:
        ValueError: the payload or the active tokens have another shape than the values ask for.
    """
    slots, groups, heads, tokens, dim = values.shape
    local = range(slots, slots) if local_slots is None else local_slots
    slot_stride, group_stride, head_stride, token_stride, _ = values.stride()
    sizes = groups, heads, tokens, dim, local.start, len(local), slot_stride, group_stride, head_stride, token_stride
    if bits is None or payload is None:
        return EncodingLayout(*sizes, 1, tokens, 0, 1, 1, 0.0, 0, 0, 0)
    grid, sent = quantize.GRIDS[bits], tokens if active is None else active.count
    row_tokens = quantize.tokens_per_row(bits, dim, tokens, active is None)
    rows = groups * heads * sent // row_tokens
    scales_offset = quantize.level_bytes(bits, rows, row_tokens * dim)
    gain_offset = scales_offset + rows if sends_gain else 0
    size = scales_offset + rows + GAIN_BYTES * sends_gain
    if payload.stride(-1) != 1 or payload.shape != (slots, size):
        raise ValueError(
            f"a payload of {tuple(payload.shape)} with strides {payload.stride()}; {slots} slots take {size} "
            "contiguous bytes each"
        )
    expected = slots - len(local), groups, tokens
    if active is not None and active.positions.shape != expected:
        raise ValueError(f"active tokens of {tuple(active.positions.shape)}; the values have {expected}")
    levels = grid.levels, grid.per_byte, grid.per_byte if grid.is_across_rows else 1, grid.width
    return EncodingLayout(*sizes, row_tokens, sent, *levels, payload.stride(0), scales_offset, gain_offset)


def _unit(layout: EncodingLayout) -> tuple[int, int]:
    """Return the number of heads of a link, and the fewest of them after which no byte has rows of both sides."""
    rows = layout.active // layout.row_tokens
    return layout.groups * layout.heads, layout.packed_rows // math.gcd(layout.packed_rows, rows)


def _in_threads(loop: Callable, count: int, values: int, unit: tuple[int, int], *arguments: object) -> None:
    """Run a loop over `count` items of `values` values each, in at most PyTorch's number of threads.

    Args:
        loop: called with the first item, the end of the items, and the arguments.
        count: number of items.
        values: number of values of an item.
        unit: number of items of a link, and of those that one thread must process together.
        arguments: further arguments of the loop.
    """
    threads = min(torch.get_num_threads(), count, 1 + count * values // _VALUES_PER_THREAD)
    if threads <= 1:
        loop(0, count, *arguments)
        return
    of_link, together = unit
    bounds = [count * number // threads for number in range(threads)]
    bounds = [*(bound - bound % of_link % together for bound in bounds), count]
    pool, tasks = _pool(os.getpid(), threads), []
    try:
        for first, last in itertools.pairwise(bounds):
            tasks.append(pool.submit(loop, first, last, *arguments))
    finally:  # tensors that the threads access must live until all are done
        futures.wait(tasks)
    for task in tasks:
        task.result()


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return the thread pool of a process; a fork needs one of its own."""
    return ThreadPoolExecutor(threads, "cocodiff-kernels")


def _with_contiguous_rows(values: torch.Tensor) -> torch.Tensor:
    """Return values whose last dim is contiguous, as a copy if need be."""
    return values if values.stride(-1) == 1 else values.contiguous()


def _with_contiguous_base(base: Base | None) -> Base | None:
    """Return a base whose last dim is contiguous; the caller keeps it while loops access it."""
    return None if base is None else base._replace(values=_with_contiguous_rows(base.values))


def _base_rows(base: Base | None) -> BaseRows:
    """Return where the loops find a base."""
    if base is None:
        return NO_BASE
    # A weight of type int would let Numba compile the loops once more.
    return BaseRows(base.values.data_ptr(), float(base.weight), *base.values.stride()[:4])


def _addresses(prediction: Prediction) -> tuple[int, int, int]:
    """Return the addresses of a prediction's reference, previous reference and gains."""
    return prediction.reference.data_ptr(), _address(prediction.previous), _address(prediction.gains)


def _address(tensor: torch.Tensor | None) -> int:
    """Return a tensor's address, or 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
