"""Durations of PyTorch's operations on an accelerator: their FLOPs and bytes, from the shapes of their tensors."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from xfuser_cocodiff.lab.accelerator.accelerators import Accelerator

_FREE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "alias", "lift_fresh"}
"""Operations without a kernel, besides views."""
_UNMARKED_VIEWS = {"_unsafe_view", "_reshape_alias"}
"""Views that their schema does not declare."""


def name_of(func: Any) -> str:
    """Return the name of an operation without its namespace."""
    return func._schema.name.partition("::")[2]


def is_free(func: Any) -> bool:
    """Return whether an operation launches no kernel."""
    return func.is_view or func.namespace == "prim" or name_of(func) in _FREE | _UNMARKED_VIEWS


def is_attention(func: Any) -> bool:
    """Return whether an operation computes a whole attention."""
    return "scaled_dot_product" in name_of(func)


def kernel_seconds(accelerator: Accelerator, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> float:
    """Return the duration of an operation's kernel.

    Args:
        accelerator: the device.
        func: the operation.
        args: its positional arguments.
        kwargs: its keyword arguments.
        result: its result.
    """
    tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)}
    moved = moved_bytes(tensors.values())
    if is_attention(func):
        query, key, value = args[:3]
        batch, heads, queries, head_dim = query.shape
        flops = 2.0 * batch * heads * queries * key.shape[2] * (head_dim + value.shape[3])
        return accelerator.kernel_seconds(moved, attention_flops=flops, head_dim=head_dim)
    count = flop_registry.get(func._overloadpacket)
    flops = float(count(*args, **kwargs, out_val=result)) if count else 0.0
    return accelerator.kernel_seconds(moved, matmul_flops=flops)


def moved_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all values of some tensors; values that repeat along an expanded dim count once."""
    return sum(math.prod(_moved_sizes(tensor.shape, tensor.stride())) * tensor.element_size() for tensor in tensors)


def _moved_sizes(sizes: Sequence[int], strides: Sequence[int]) -> Iterable[int]:
    return (size for size, stride in zip(sizes, strides, strict=True) if stride != 0)
