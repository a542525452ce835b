"""Deferred computation of MLPs parallel to attention, which overlaps with the all-to-all of Q, K and V."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

PARALLEL_MLP = ("proj_mlp", "act_mlp")
"""Submodules of a block with an MLP parallel to attention, in the order of their calls: the names that diffusers
has in FLUX.1, HunyuanVideo, Chroma and more."""


class Deferred:
    """A tensor that is computed when it is first used: as an argument of a function of PyTorch, or by an attribute.

    Args:
        compute: returns the tensor; called once.
    """

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self._compute: Callable[[], torch.Tensor] | None = compute
        self._tensor: torch.Tensor

    def materialize(self) -> torch.Tensor:
        """Return the tensor, computed now unless it has been."""
        if self._compute:
            self._tensor = self._compute()
            self._compute = None
        return self._tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*tree_map(materialize, args), **tree_map(materialize, kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.materialize(), name)


def _operator(name: str) -> Callable:
    return lambda deferred, *others: getattr(deferred.materialize(), name)(*map(materialize, others))


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), "neg", "abs", "len", "iter", "getitem"):
    setattr(Deferred, f"__{_name}__", _operator(f"__{_name}__"))  # Python looks up operators in the class


def materialize(value: Any) -> Any:
    """Return the tensor of a :class:`Deferred`, and any other value unchanged."""
    return value.materialize() if isinstance(value, Deferred) else value


def has_parallel_mlp(block: nn.Module) -> bool:
    """Return whether a block has an MLP parallel to attention that may run later than it is called."""
    parts = [getattr(block, name, None) for name in PARALLEL_MLP]
    return all(isinstance(part, nn.Module) and not is_prefetched(part) for part in parts)


def is_prefetched(module: nn.Module) -> bool:
    """Return whether diffusers may prefetch the weights of a module in the order of the first calls."""
    return "_diffusers_hook" in vars(module)
