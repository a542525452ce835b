"""Rings of other systems: one all-gather of K and V, and CompactFusion's residuals of 2 bits.

Sizes in shapes: R ranks of a ring, B batch, H heads, S sequence, D head dim.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor.experimental._context_parallel._attention import _SDPAMerger

from benchmarks.accelerator.device import EmulatedAccelerator
from benchmarks.cluster.fp4_ulysses import wait

RESIDUAL_BITS = 2


def gathered_attention(
    group: dist.ProcessGroup,
    attention: Callable[..., tuple[torch.Tensor, ...]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Compute attention to the K and V of all ranks at once, after one all-gather of both.

    Args:
        group: ring.
        attention: xDiT's attention function.
        query: shape (B, H, S, D).
        key: K of this rank, shape (B, H, S, D).
        value: as `key`.
        options: keyword arguments of the attention function.

    Returns:
        O, shape (B, H, S, D).
    """
    own = torch.stack([key, value])
    gathered = wait(collectives.all_gather_single(own.flatten(), 0, group)).view(group.size(), *own.shape)
    key, value = gathered.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)  # (2, B, H, R, S, D): tokens in the order of ranks
    if joint := options.get("joint_attn_kwargs"):
        options = {**options, "joint_attn_kwargs": {**joint, "total_steps": 1}}  # which joins text to the last block
    return attention(query, key, value, **options)[0]


def residual_attention(
    group: dist.ProcessGroup,
    device: EmulatedAccelerator,
    attention: Callable[..., tuple[torch.Tensor, ...]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Compute attention to the K and V of all ranks, each while the next is on its way as residuals of 2 bits.

    They are residuals to those of the last step, which both ends hold. Partial outputs are merged as in stock's ring
    attention. See :func:`gathered_attention` for the arguments.
    """
    size, merger = group.size(), _SDPAMerger(convert_to_f32=True, seq_dim=1)
    values = torch.stack([key, value])
    base = torch.empty_like(values)  # stands for what both ends hold
    # CompactFusion's `int2_quant_fastpath` computes scales of channels (2, 1, H, 1, D) and of tokens (2, B, 1, S, 1) by
    # PyTorch operators, before its kernel.
    magnitude = (values - base).abs()
    of_channels, of_tokens = magnitude.mean((1, 3), keepdim=True), magnitude.mean((2, 4), keepdim=True)
    of_tokens = of_tokens / (of_tokens.mean((1, 2, 3, 4), keepdim=True) + 1e-6)
    read, shapes = [values, base, of_channels, of_tokens], [(residual_bytes(base.shape),), (base.nbytes,)]
    message, _ = device.run_kernel(read, shapes, torch.uint8)
    for step in range(size):
        if step < size - 1:
            targets = [(source + 1) % size for source in range(size)]
            in_flight = collectives.permute_tensor(message, targets, group)
        output, lse, *_ = attention(query, key, value, **options)
        merger.step(output, lse, partial=False)
        if step < size - 1:
            message = wait(in_flight)
            key, value = device.run_kernel([message, base], [base.shape], base.dtype)[0]
    return merger.results()[0]


def residual_bytes(shape: Sequence[int]) -> int:
    """Return the bytes of K and V (2, B, H, S, D) as residuals of 2 bits, with scales of channels and tokens."""
    pair, batch, heads, tokens, dim = shape
    return math.prod(shape) * RESIDUAL_BITS // 8 + 2 * pair * (heads * dim + batch * tokens)
