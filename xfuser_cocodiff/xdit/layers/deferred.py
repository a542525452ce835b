"""What a block needs only once it has attended: parallel MLPs, which can be computed while exchanges are under way."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

PARALLEL_MLP = ("proj_mlp", "act_mlp")
"""Submodules of a block, one given what the other returns, as diffusers names them wherever an MLP lies beside
attention (FLUX.1, HunyuanVideo, Chroma and more)."""


class Deferred:
    """A tensor that is made when somebody needs it: any function of PyTorch that is given it does.

    Args:
        make: makes it; called once.
    """

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make: Callable[[], torch.Tensor] | None = make
        self._made: torch.Tensor

    def made(self) -> torch.Tensor:
        """The tensor."""
        if self._make:
            self._made = self._make()
            self._make = None
        return self._made

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*tree_map(made, args), **tree_map(made, kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.made(), name)


def _operator(name: str) -> Callable:
    return lambda later, *others: getattr(later.made(), name)(*map(made, others))


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), "neg", "abs", "len", "iter", "getitem"):
    setattr(Deferred, f"__{_name}__", _operator(f"__{_name}__"))  # Python looks for them in the class


def made(value: Any) -> Any:
    """A value, or the tensor that it stands for."""
    return value.made() if isinstance(value, Deferred) else value


def has_parallel_mlp(block: nn.Module) -> bool:
    """Whether a block has one, with nobody listening who would have to see its values at once."""
    submodules = [getattr(block, name, None) for name in PARALLEL_MLP]
    return all(isinstance(submodule, nn.Module) and not has_hooks(submodule) for submodule in submodules)


def has_hooks(submodule: nn.Module) -> bool:
    """Whether others have hooks on a module, which see its values when it is called."""
    hooks = submodule._forward_hooks or submodule._forward_pre_hooks
    return bool(hooks) or hasattr(submodule, "_hf_hook") or hasattr(submodule, "_diffusers_hook")
