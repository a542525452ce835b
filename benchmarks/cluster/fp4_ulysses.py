"""Ulysses all-to-alls of LightX2V: Q, K, V and O in FP4 (e2m1) with an FP8 scale of 16 values each, without state.

Kernels are fused, so each is one launch that reads its inputs and writes its outputs once. Recorded tensors have no
values, so only bytes are modeled.

Sizes in shapes: P ranks of the Ulysses group, B batch, H heads, h = H / P, S sequence, D head dim.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from benchmarks.accelerator.device import EmulatedAccelerator

BYTES_PER_VALUE = 1 / 2 + 1 / 16


def exchange_inputs(
    group: dist.ProcessGroup, device: EmulatedAccelerator, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return tensors (B, H, S/P, D), sent in one message, as (B, h, S, D).

    Args:
        group: the Ulysses group.
        device: runs the kernels.
        tensors: some of Q, K and V.
    """
    ranks, sizes = group.size(), [each.shape for each in tensors]
    shapes = [(batch, heads // ranks, tokens * ranks, dim) for batch, heads, tokens, dim in sizes]
    return device.run_kernel([_send(group, device, tensors)], shapes, tensors[0].dtype)


def exchange_output(group: dist.ProcessGroup, device: EmulatedAccelerator, output: torch.Tensor) -> torch.Tensor:
    """Return O (B, h, S, D) as (B, H, S/P, D); see :func:`exchange_inputs`."""
    ranks, (batch, heads, tokens, dim) = group.size(), output.shape
    shape = batch, heads * ranks, tokens // ranks, dim
    return device.run_kernel([_send(group, device, [output])], [shape], output.dtype)[0]


def _send(group: dist.ProcessGroup, device: EmulatedAccelerator, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Encode tensors, and return the message that arrives."""
    size = round(BYTES_PER_VALUE * sum(each.numel() for each in tensors))
    [message] = device.run_kernel(tensors, [(size,)], torch.uint8)
    return wait(collectives.all_to_all_single(message, None, None, group))


def wait(in_flight: torch.Tensor) -> torch.Tensor:
    """Return the result of a functional collective once it has arrived."""
    return in_flight.wait() if isinstance(in_flight, collectives.AsyncCollectiveTensor) else in_flight
