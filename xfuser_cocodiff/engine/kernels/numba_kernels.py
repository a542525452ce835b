"""The kernels for CPUs, compiled by Numba: each reads and writes every tensor once. See the package for what they do.

What is sent as it is needs no arithmetic, and half precision other than bfloat16 is rare on CPUs: there PyTorch's run,
which are as good as these for the other end of a link.
"""

import functools
import itertools
import os
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from xfuser_cocodiff.engine.kernels import numba_loops, quantize, torch_kernels
from xfuser_cocodiff.engine.kernels.numba_loops import Form
from xfuser_cocodiff.engine.kernels.rows import TOLD, ActiveTokens, Encoded, Prediction, others, sampled
from xfuser_cocodiff.engine.topology.devices import CPU

_KINDS = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
"""A value of the type in which the loops have them."""
_PAYS = 2**17
"""Values from which on another thread is worth its start."""


@functools.cache
def prepare() -> None:
    """Have all of them compiled, or loaded, which takes a while in the first call."""
    for dtype in _KINDS:
        values = torch.zeros(1, 1, 1, 1, 64, dtype=dtype)
        known = Prediction(values, values, torch.zeros(1, dtype=torch.uint8))
        payload = torch.zeros(1, quantize.row_bytes(2, 64) + 1, dtype=torch.uint8)
        scores(values, known, None)
        encode(values, known, 2, None, payload, None)
        decode(payload, known, 2, None, torch.empty_like(values), None)


def scores(values: torch.Tensor, known: Prediction, here: range | None) -> torch.Tensor:
    """See the package."""
    if values.dtype not in _KINDS:
        return torch_kernels.scores(values, known, here)
    values = _rows_of(values)
    links, groups, heads, tokens, _ = known.held.shape
    _check(values, known, here)
    form = _form(values, here, None, None)
    found = torch.empty(links, groups, tokens, dtype=torch.float32, device=CPU)
    _in_threads(
        numba_loops.score, links * groups, heads * tokens, form, _KINDS[values.dtype],
        values.data_ptr(), known.held.data_ptr(), _address(known.before), _address(known.shares), found.data_ptr(),
    )  # fmt: skip
    return found


def encode(
    values: torch.Tensor,
    known: Prediction | None,
    bits: float | None,
    active: ActiveTokens | None,
    payload: torch.Tensor,
    here: range | None,
    tells: bool = False,
) -> Encoded:
    """See the package."""
    if known is None or bits is None or values.dtype not in _KINDS:
        return torch_kernels.encode(values, known, bits, active, payload, here, tells)
    values, grid = _rows_of(values), quantize.GRIDS[bits]
    links, groups, heads, tokens, dim = known.held.shape
    form = _form(values, here, bits, active, payload, tells and known.shares is not None)
    _check(values, known, here)
    now, sums = torch.empty_like(known.held), torch.empty(links, groups, heads, 4, dtype=torch.float64, device=CPU)
    totals = torch.empty(2, dtype=torch.float32, device=CPU)
    again = None if known.before is None else torch.empty(links, dtype=torch.uint8, device=CPU)
    root = grid.reach if grid.by_maximum else (form.together * dim) ** -0.5
    _in_threads(
        numba_loops.encode, links * groups * heads, tokens * dim,
        form, _KINDS[values.dtype], np.float32(root), grid.by_maximum, sampled(tokens),
        values.data_ptr(), known.held.data_ptr(), _address(known.before), _address(known.shares),
        _address(active and active.numbers), quantize.scale_table(CPU).data_ptr(),
        payload.data_ptr(), now.data_ptr(), sums.data_ptr(),
    )  # fmt: skip
    numba_loops.total(sums.data_ptr(), links, groups * heads, totals.data_ptr(), _address(again))
    lacking, wanted = totals.unbind()
    return Encoded(now, lacking, wanted, again)


def decode(
    payload: torch.Tensor,
    known: Prediction | None,
    bits: float | None,
    active: ActiveTokens | None,
    target: torch.Tensor,
    here: range | None,
    tells: bool = False,
) -> torch.Tensor:
    """See the package."""
    if known is None or bits is None or target.dtype not in _KINDS or target.stride(-1) != 1:
        return torch_kernels.decode(payload, known, bits, active, target, here, tells)
    links, groups, heads, tokens, dim = known.held.shape
    _check(target, known, here)
    form, now = _form(target, here, bits, active, payload, tells), torch.empty_like(known.held)
    _in_threads(
        numba_loops.decode, links * groups * heads, tokens * dim, form, _KINDS[target.dtype],
        payload.data_ptr(), known.held.data_ptr(), _address(known.before), _address(known.shares),
        _address(active and active.numbers), quantize.scale_table(CPU).data_ptr(), now.data_ptr(), target.data_ptr(),
    )  # fmt: skip
    return now


def _check(values: torch.Tensor, known: Prediction, here: range | None) -> None:
    """Check that what is known is of these values: the kernels only see addresses."""
    shape = others(values.shape[0], here), *values.shape[1:]
    for held in (known.held, *([] if known.before is None else [known.before])):
        if held.shape != shape or held.dtype != values.dtype or not held.is_contiguous():
            raise ValueError(f"references of {tuple(held.shape)} {held.dtype} for values of {shape} {values.dtype}")


def _form(
    values: torch.Tensor,
    here: range | None,
    bits: float | None,
    active: ActiveTokens | None,
    payload: torch.Tensor | None = None,
    tells: bool = False,
) -> Form:
    """Of values (P, G, H, T, D) for a codec; with no bits, of which nothing is encoded."""
    places, groups, heads, tokens, dim = values.shape
    own = range(places, places) if here is None else here
    by_place, by_group, by_head, by_token, _ = values.stride()
    known = groups, heads, tokens, dim, own.start, len(own), by_place, by_group, by_head, by_token
    if bits is None or payload is None:
        return Form(*known, 1, tokens, 0, 1, 0.0, 0, 0, 0)
    grid, sent = quantize.GRIDS[bits], tokens if active is None else active.count
    together = quantize.tokens_per_row(bits, dim, tokens, active is None)
    lines = groups * heads * sent // together
    scales_at = lines * quantize.row_bytes(bits, together * dim)
    told_at = scales_at + lines if tells else 0
    size = scales_at + lines + TOLD * tells
    if payload.stride(-1) != 1 or payload.shape != (places, size):
        raise ValueError(
            f"a payload of {tuple(payload.shape)} with strides {payload.stride()}, where {places} places have {size} "
            "bytes that follow each other"
        )
    chosen = places - len(own), groups, tokens
    if active is not None and active.numbers.shape != chosen:
        raise ValueError(f"a choice among {tuple(active.numbers.shape)} tokens, where there are {chosen}")
    grid_of = grid.levels, grid.per_byte, grid.width
    return Form(*known, together, sent, *grid_of, payload.stride(0), scales_at, told_at)


def _in_threads(kernel: Callable, count: int, values: int, *arguments: object) -> None:
    """Run a kernel over so many parts of so many values each, in as many threads as PyTorch would and as pay."""
    threads = min(torch.get_num_threads(), count, 1 + count * values // _PAYS)
    if threads <= 1:
        kernel(0, count, *arguments)
        return
    bounds = [count * number // threads for number in range(threads + 1)]
    parts = itertools.pairwise(bounds)
    pool, parts_done = _pool(os.getpid(), threads), []
    try:
        for part in parts:
            parts_done.append(pool.submit(kernel, *part, *arguments))
    finally:  # what they read and write must live until then
        futures.wait(parts_done)
    for done in parts_done:
        done.result()


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "cocodiff-kernels")


def _rows_of(values: torch.Tensor) -> torch.Tensor:
    """Values whose last dim is contiguous."""
    return values if values.stride(-1) == 1 else values.contiguous()


def _address(tensor: torch.Tensor | None) -> int:
    """0 where there is none."""
    return 0 if tensor is None else tensor.data_ptr()
