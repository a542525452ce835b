"""Durations of PyTorch's operations on an accelerator: their FLOPs and bytes, from the shapes of their tensors."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from xfuser_cocodiff.tools.accelerator.accelerators import Accelerator

_FREE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "alias", "lift_fresh"}
"""Operations without a kernel, besides views."""
_OVERWRITING = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
"""In-place operations that do not read what they write."""
_GATHERING = {"embedding", "index", "index_select", "gather"}
"""Operations that read as much of their first tensor as they return."""
_UNMARKED_VIEWS = {"_unsafe_view", "_reshape_alias"}
"""Views that their schema does not declare."""
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@functools.cache
def name_of(func: Any) -> str:
    """Return the name of an operation without its namespace."""
    return func._schema.name.partition("::")[2]


def is_free(func: Any) -> bool:
    """Return whether an operation launches no kernel."""
    return func.is_view or func.namespace == "prim" or name_of(func) in _FREE | _UNMARKED_VIEWS


def is_wait(func: Any) -> bool:
    """Return whether an operation waits for a functional collective."""
    return func.namespace == "_c10d_functional" and name_of(func) == "wait_tensor"


@functools.cache
def is_composite(func: Any) -> bool:
    """Return whether an operation is run in terms of others."""
    if func.namespace != "aten" or is_attention(func):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)


def run_composite(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operation in terms of others, as in eager mode: PyTorch's decompositions for compilers differ, for example
    in a copy for each dropout of inference."""
    return func._op_dk(_COMPOSITE, *args, **kwargs)


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
    moved = op_bytes(func, args, kwargs, result)
    if is_attention(func):
        query, key, value = args[:3]
        batch, heads, queries, head_dim = query.shape
        flops = 2.0 * batch * heads * queries * key.shape[2] * (head_dim + value.shape[3])
        return accelerator.kernel_seconds(moved, attention_flops=flops, head_dim=head_dim)
    count = flop_registry.get(func._overloadpacket)
    flops = float(count(*args, **kwargs, out_val=result)) if count else 0.0
    return accelerator.kernel_seconds(moved, matmul_flops=flops)


def op_bytes(func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that an operation reads and writes. See :func:`kernel_seconds` for the arguments."""
    return _read_bytes(func, args, kwargs, result) + moved_bytes(tensors_in(result))


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the distinct tensors in nested values."""
    return list({id(leaf): leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}.values())


def _read_bytes(func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that an operation reads."""
    if name_of(func).startswith("new_") or name_of(func).endswith("_like"):
        return 0
    read, written = tensors_in((args, kwargs)), {id(tensor) for tensor in tensors_in(result)}
    if name_of(func) in _OVERWRITING or func._overloadname == "out":
        read = [tensor for tensor in read if id(tensor) not in written]
    if name_of(func) in _GATHERING:
        return min(moved_bytes(read[:1]), moved_bytes(tensors_in(result))) + moved_bytes(read[1:])
    return moved_bytes(read)


def moved_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all values of some tensors; values that repeat along an expanded dim count once."""
    return sum(math.prod(_moved_sizes(tensor.shape, tensor.stride())) * tensor.element_size() for tensor in tensors)


def _moved_sizes(sizes: Sequence[int], strides: Sequence[int]) -> Iterable[int]:
    return (size for size, stride in zip(sizes, strides, strict=True) if stride != 0)
