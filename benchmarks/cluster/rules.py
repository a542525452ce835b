"""What stock and other systems send in Ulysses attention: each rule replaces collectives inside xDiT's USP.

Attention itself runs in the dtype of the model: rules change what is sent, and what is computed to send it. Scales
travel in the message of their values, and encoding and decoding are one kernel each. Recorded tensors have no values,
so only bytes are modeled.

Sizes in shapes: P ranks of the Ulysses group, B batch, H heads, h = H / P, S sequence, D head dim.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from benchmarks import bare_runtime
from benchmarks.accelerator.device import EmulatedAccelerator

STOCK, COMBINED, SEPARATE = "stock", "stock-combined", "stock-separate"
"""Stock as the model calls it, and with Q, K and V in one message and in three."""
BYTES_PER_VALUE = {
    # LightX2V: ModelTC/LightX2V@3d2bd26, lightx2v/common/ops/attn/utils/seq_p.py; introduced in ModelTC/LightX2V#917
    "fp4": 1 / 2 + 1 / 16,
}
"""Bytes per value of Q, K, V and O in the messages of other systems, with scales: FP4 has one in FP8 for 16 values."""
RULES = (STOCK, COMBINED, SEPARATE, *BYTES_PER_VALUE)


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
    if rule not in BYTES_PER_VALUE:
        return {}
    coded = CodedUlysses(bare_runtime.process_groups()[0], device, BYTES_PER_VALUE[rule])
    return {
        "_ft_c_input_all_to_all": lambda tensor: coded.exchange_inputs([tensor])[0],
        "_combined_qkv_all_to_all": lambda *tensors: tuple(coded.exchange_inputs(tensors)),
        "_ft_c_output_all_to_all": coded.exchange_output,
    }


class CodedUlysses:
    """All-to-alls of encoded values, without state.

    Args:
        group: the Ulysses group.
        device: runs the kernels.
        bytes_per_value: size of an encoded value.
    """

    def __init__(self, group: dist.ProcessGroup, device: EmulatedAccelerator, bytes_per_value: float) -> None:
        self._group, self._device, self._bytes_per_value = group, device, bytes_per_value

    def exchange_inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors (B, H, S/P, D), sent in one message, as (B, h, S, D)."""
        ranks, sizes = self._group.size(), [each.shape for each in tensors]
        shapes = [(batch, heads // ranks, tokens * ranks, dim) for batch, heads, tokens, dim in sizes]
        return self._device.run_kernel([self._send(tensors)], shapes, tensors[0].dtype)

    def exchange_output(self, output: torch.Tensor) -> torch.Tensor:
        """Return O (B, h, S, D) as (B, H, S/P, D)."""
        ranks, (batch, heads, tokens, dim) = self._group.size(), output.shape
        shape = batch, heads * ranks, tokens // ranks, dim
        return self._device.run_kernel([self._send([output])], [shape], output.dtype)[0]

    def _send(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Encode tensors, and return the message that arrives."""
        size = round(self._bytes_per_value * sum(each.numel() for each in tensors))
        [message] = self._device.run_kernel(tensors, [(size,)], torch.uint8)
        received = collectives.all_to_all_single(message, None, None, self._group)
        return received.wait() if isinstance(received, collectives.AsyncCollectiveTensor) else received
