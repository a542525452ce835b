"""Provenance of tensors without values, which answers whether two of them would be equal."""

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.accelerator import op_cost

Sources = tuple[int, ...]
"""Numbers of the computations whose results a tensor consists of, in order."""
_ATTRIBUTE = "_cocodiff_sources"
"""Attribute of a storage: the sources of all that it holds."""
_FILLING = {"zeros", "ones", "full", "arange", "new_zeros", "new_ones", "new_full"}
"""Operations that depend on no tensor's values."""
_RANDOM = {
    "new_empty",
    "new_empty_strided",
    "empty_like",
    "rand_like",
    "randn_like",
    "bernoulli",
    "normal_",
    "uniform_",
}
"""Operations whose results equal no others."""


class Provenance:
    """Tracks the computations that tensors come from; equal computations of equal inputs have equal numbers.

    Sources belong to storages, so that views and in-place operations need nothing of their own. The order of dims is
    not tracked: a tensor has the sources of its transpose.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return whether two tensors have the same shape and come from the same computations."""
        return one.shape == other.shape and self.sources(one) == self.sources(other)

    def sources(self, tensor: torch.Tensor) -> Sources:
        """Return the sources of a tensor."""
        if not isinstance(tensor, FakeTensor):
            return self.new()  # values on the host may change unnoticed
        everything = self._everything(tensor)
        return everything if is_whole(tensor) else self.number("part", everything, *_place(tensor))

    def follow(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Set the sources of what an operation with a kernel of its own, or none, has written.

        Args:
            func: the operation.
            args: its positional arguments.
            kwargs: its keyword arguments.
            result: what it returned.
        """
        inputs = op_cost.tensors_in((args, kwargs))
        storages = {each.untyped_storage()._cdata for each in inputs}
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
        for index, output in enumerate(outputs):
            if func._schema.is_mutable or output.untyped_storage()._cdata not in storages:  # else it is a view
                self.write(output, self._sources_of_result(func, args, kwargs, inputs, index))

    def _sources_of_result(
        self, func: Any, args: tuple, kwargs: dict[str, Any], inputs: list[torch.Tensor], index: int
    ) -> Sources:
        name, sources = op_cost.name_of(func), [self.sources(each) for each in inputs]
        if name in ("clone", "_to_copy"):
            return sources[0]
        if name == "copy_":
            return sources[-1]
        if name == "cat":
            return tuple(
                number for each in tree_leaves(args) if isinstance(each, torch.Tensor) for number in self.sources(each)
            )
        if name in _RANDOM or not (inputs or name in _FILLING):
            return self.new()
        return self.number(func, str(tree_map_only(torch.Tensor, _geometry, (args, kwargs))), index, *sources)

    def write(self, tensor: torch.Tensor, sources: Sources) -> None:
        """Set the sources of a tensor that an operation has written."""
        if not is_whole(tensor):
            sources = self.number("written", self._everything(tensor), *_place(tensor), sources)
        setattr(tensor.untyped_storage(), _ATTRIBUTE, sources)

    def number(self, *computation: Hashable) -> Sources:
        """Return the sources of a computation's result."""
        return (self._numbers.setdefault(computation, len(self._numbers)),)

    def new(self) -> Sources:
        """Return the sources of values that equal no others."""
        return self.number("new", len(self._numbers))

    def _everything(self, tensor: torch.Tensor) -> Sources:
        """Return the sources of all that a tensor's storage holds."""
        storage = tensor.untyped_storage()
        sources = getattr(storage, _ATTRIBUTE, None)
        if sources is None:
            sources = self.new()
            setattr(storage, _ATTRIBUTE, sources)
        return sources


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor consists of all values of its storage."""
    sizes = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return tensor.storage_offset() == 0 and sizes * tensor.element_size() == tensor.untyped_storage().nbytes()


def _place(tensor: torch.Tensor) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return which values of its storage a tensor consists of, whatever the order of its dims: offset and dims."""
    dims: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 or size == 1:
            continue
        if dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = dims[-1][0], dims[-1][1] * size
        else:
            dims.append((stride, size))
    return tensor.storage_offset(), tuple(dims)


def _geometry(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset()
