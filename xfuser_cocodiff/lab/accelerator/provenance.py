"""Provenance of tensors without values, which answers whether two of them would be equal."""

import itertools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

Sources = tuple[int, ...]
"""Numbers of the computations whose results a tensor consists of, in order."""
_COPIES = {"clone", "contiguous", "_to_copy", "_unsafe_view", "alias", "detach", "_reshape_copy", "view_copy"}


class Provenance:
    """Tracks the computations that tensors come from; equal computations of equal inputs have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def follow(self, func: Any, args: tuple, result: Any) -> None:
        """Set the sources of an operation's results. Views and copies keep those of their input."""
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
        inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        name = func._schema.name.partition("::")[2]
        if inputs and (func.is_view or name in _COPIES):
            sources = self.sources(inputs[0])
        elif name == "cat":
            # Parts of one result, such as attention by head groups, join to that result.
            sources = tuple(number for number, _ in itertools.groupby(n for each in inputs for n in self.sources(each)))
        else:
            scalars = [repr(leaf) for leaf in tree_leaves(args) if not isinstance(leaf, torch.Tensor)]
            sources = (self._number((name, *map(self.sources, inputs), *scalars)) if inputs else self._new(),)
        for output in outputs:
            output.cocodiff_sources = sources

    def sources(self, tensor: torch.Tensor) -> Sources:
        """Return the sources of a tensor; those of a parameter are its own."""
        sources = getattr(tensor, "cocodiff_sources", None)
        if sources is None:
            sources = (self._number(("constant", tensor.untyped_storage()._cdata)),)
        return sources

    def equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return whether two tensors have the same shape and come from the same computations."""
        return one.shape == other.shape and self.sources(one) == self.sources(other)

    def _number(self, computation: Any) -> int:
        return self._numbers.setdefault(computation, len(self._numbers))

    def _new(self) -> int:
        return self._number(("new", len(self._numbers)))
