"""Keys of prompts, which tell the calls of one run from those of another.

A prompt is compared by the identity of its tensor: the host never waits for a device here, and copies no values.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from xfuser_cocodiff.xdit.layers.module_stack import named_arguments

PROMPTS = ("encoder_hidden_states", "cap_feats", "llm_features", "input_ids")
"""Prefixes of the names of arguments that hold a prompt."""


@dataclass(frozen=True)
class TensorKey:
    """The identity of a tensor, which it does not keep alive."""

    base: weakref.ref
    """Reference to the tensor, or to the one that it is a view of."""
    view: tuple
    """Offset, shape and stride of the view, and the version counter."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorKey":
        base = tensor if tensor._base is None else tensor._base
        return cls(weakref.ref(base), (tensor.storage_offset(), tensor.shape, tensor.stride(), _version(tensor)))

    def is_same(self, other: "TensorKey") -> bool:
        """Return whether both are the same tensor, which has not been written in between."""
        return self.base() is not None and self.base() is other.base() and self.view == other.view


@dataclass(frozen=True)
class PromptKey:
    """The prompt of a call of a transformer."""

    tensors: tuple[TensorKey, ...]
    """Keys of the prompt's tensors; empty if no argument is known to hold it."""
    shapes: tuple[torch.Size, ...]
    """Shapes of all tensors among the arguments."""

    @classmethod
    def of(cls, transformer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> "PromptKey":
        """Return the key of a call."""
        given = named_arguments(transformer, args, kwargs)
        shapes = tuple(tensor.shape for value in given.values() for tensor in _tensors(value))
        return cls(tuple(map(TensorKey.of, prompts_of(transformer, args, kwargs))), shapes)

    def is_same(self, other: "PromptKey") -> bool:
        """Return whether both calls have the same prompt, and tensors of the same shapes."""
        pairs = zip(self.tensors, other.tensors, strict=False)
        return self.shapes == other.shapes and all(one.is_same(another) for one, another in pairs)


def prompts_of(transformer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a call that hold its prompt."""
    given = named_arguments(transformer, args, kwargs)
    return [tensor for name, value in given.items() if name.startswith(PROMPTS) for tensor in _tensors(value)]


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor, or all tensors in nested lists and tuples."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
