"""What stock and other systems send in Ulysses attention: each rule replaces collectives inside xDiT's USP.

Attention itself runs in the dtype of the model: rules change what is sent, and what is computed to send it. Scales
travel in the message of their values, and encoding and decoding are one kernel each. Recorded tensors have no values,
so only bytes are modeled.

Sizes in shapes: P ranks of the Ulysses group, B batch, H heads, h = H / P, S sequence, D head dim.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from benchmarks import bare_runtime
from benchmarks.accelerator.device import EmulatedAccelerator

STOCK, COMBINED, SEPARATE = "stock", "stock-combined", "stock-separate"
"""Stock as the model calls it, and with Q, K and V in one message and in three."""
BYTES_PER_VALUE = {
    # xDiT's own on AMD: one scale for a tensor
    "fp8": 1.0,
    # LightX2V: ModelTC/LightX2V@3d2bd26, lightx2v/common/ops/attn/utils/seq_p.py; introduced in ModelTC/LightX2V#917
    "fp4": 1 / 2 + 1 / 16,
}
"""Bytes per value of Q, K, V and O in the messages of other systems, with scales: FP4 has one in FP8 for 16 values."""
RING_BYTES_PER_VALUE = {
    # CompactFusion, residuals to the last step: Cobalt-27/CompactFusion, xfuser/compact/ring.py and fastpath.py (int2)
    "compact": 1 / 4,
}
"""Bytes per value of K and V in the rings of other systems; their few scales are left out."""
RULES = (STOCK, COMBINED, SEPARATE, *BYTES_PER_VALUE, *RING_BYTES_PER_VALUE)


@contextmanager
def running(rule: str, device: EmulatedAccelerator) -> Iterator[None]:
    """Return a context in which xDiT runs by a rule on a device.

    USP itself stays, because models hold it: its globals and the default of an argument are replaced. The plugin's
    session must be inactive, and xDiT's process groups must exist.
    """
    from xfuser.model_executor.layers import usp

    with ExitStack() as stack:
        for name, replacement in _replacements(rule, device, usp._ft_c_input_all_to_all).items():
            stack.enter_context(mock.patch.object(usp, name, replacement))
        if rule == COMBINED or rule in BYTES_PER_VALUE:
            stock = inspect.unwrap(usp.USP)
            parameters = inspect.signature(stock).parameters.values()
            defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
            combining = tuple({**defaults, "combine_qkv_a2a": True}.values())
            stack.enter_context(mock.patch.object(stock, "__defaults__", combining))
        yield


def _replacements(
    rule: str, device: EmulatedAccelerator, single: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Callable]:
    """Return the functions of USP's module to replace, by name, given its all-to-all of one tensor."""
    if rule == SEPARATE:
        return {"_combined_qkv_all_to_all": lambda *tensors: tuple(map(single, tensors))}
    if rule in RING_BYTES_PER_VALUE:
        ring = bare_runtime.process_groups()[1]
        return {"ring_attn": functools.partial(coded_ring, ring, device, RING_BYTES_PER_VALUE[rule])}
    if rule not in BYTES_PER_VALUE:
        return {}
    coded = CodedUlysses(bare_runtime.process_groups()[0], device, BYTES_PER_VALUE[rule])
    return {
        "_ft_c_input_all_to_all": lambda tensor: coded.send_inputs([tensor])[0],
        "_combined_qkv_all_to_all": lambda *tensors: tuple(coded.send_inputs(tensors)),
        "_ft_c_output_all_to_all": coded.send_output,
    }


def coded_ring(
    group: dist.ProcessGroup,
    device: EmulatedAccelerator,
    bytes_per_value: float,
    attention: Callable[..., tuple[torch.Tensor, ...]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Return O: attention to each rank's K and V, while the next are in flight as residuals to those of the last step.

    Args:
        group: the ring.
        device: runs the kernels.
        bytes_per_value: size of an encoded value.
        attention: xDiT's attention function.
        query: Q (B, H, S/P, D).
        key: as `query`.
        value: as `query`.
        options: keyword arguments of the attention function.
    """
    # Not every PyTorch that runs the other benchmarks has this module.
    from torch.distributed.tensor.experimental._context_parallel._attention import _SDPAMerger

    ranks, merger = group.size(), _SDPAMerger(convert_to_f32=True, seq_dim=1)
    values, reference = torch.stack([key, value]), torch.empty(2, *key.shape, dtype=key.dtype, device=key.device)
    size = round(bytes_per_value * values.numel())
    message, _ = device.run_kernel([values, reference], [(size,), (reference.nbytes,)], torch.uint8)
    for block in range(ranks):
        is_last = block == ranks - 1
        in_flight = None if is_last else collectives.permute_tensor(message, [*range(1, ranks), 0], group)
        output, lse, *_ = attention(query, key, value, **options)
        merger.step(output, lse, partial=False)
        if in_flight is not None:
            message = _wait(in_flight)
            key, value = device.run_kernel([message, reference], [reference.shape], reference.dtype)[0]
    return merger.results()[0]


class CodedUlysses:
    """All-to-alls of encoded values, without state.

    Args:
        group: the Ulysses group.
        device: runs the kernels.
        bytes_per_value: size of an encoded value.
    """

    def __init__(self, group: dist.ProcessGroup, device: EmulatedAccelerator, bytes_per_value: float) -> None:
        self._group, self._device, self._bytes_per_value = group, device, bytes_per_value

    def send_inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors (B, H, S/P, D), sent in one message, as (B, h, S, D)."""
        ranks, sizes = self._group.size(), [each.shape for each in tensors]
        shapes = [(batch, heads // ranks, tokens * ranks, dim) for batch, heads, tokens, dim in sizes]
        return self._device.run_kernel([self._send(tensors)], shapes, tensors[0].dtype)

    def send_output(self, output: torch.Tensor) -> torch.Tensor:
        """Return O (B, h, S, D) as (B, H, S/P, D)."""
        ranks, (batch, heads, tokens, dim) = self._group.size(), output.shape
        shape = batch, heads * ranks, tokens // ranks, dim
        return self._device.run_kernel([self._send([output])], [shape], output.dtype)[0]

    def _send(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Encode tensors, and return the message that arrives."""
        size = round(self._bytes_per_value * sum(each.numel() for each in tensors))
        [message] = self._device.run_kernel(tensors, [(size,)], torch.uint8)
        return _wait(collectives.all_to_all_single(message, None, None, self._group))


def _wait(in_flight: torch.Tensor) -> torch.Tensor:
    return in_flight.wait() if isinstance(in_flight, collectives.AsyncCollectiveTensor) else in_flight
