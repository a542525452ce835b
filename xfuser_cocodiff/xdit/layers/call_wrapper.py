"""A replacement of a module's call that sees how it ends: hooks do not see an interrupt."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class CallWrapper:
    """A replacement of a module's call, its hooks included. PyTorch leaves it out of copies of the module.

    It does not hold the module: a cycle would keep its weights until the garbage collector runs.

    Args:
        module: its call is replaced at once.
        call: called instead, with the original call and its arguments.
    """

    def __init__(self, module: nn.Module, call: Callable) -> None:
        self._module, self._call = weakref.ref(module), call
        self._inner = module._compiled_call_impl
        """The call that the module had in place of its class's, as of torch.compile."""
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.original, *args, **kwargs)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as without this wrapper."""
        return (self._inner or self._module()._call_impl)(*args, **kwargs)

    def remove(self) -> None:
        """Restore the original call; a wrapper around this one keeps its place."""
        self._call = lambda original, *args, **kwargs: original(*args, **kwargs)
        module = self._module()
        outer = module._compiled_call_impl if module is not None else None
        if outer is self:
            del module._compiled_call_impl
            if self._inner is not None:
                module._compiled_call_impl = self._inner
        while isinstance(outer, CallWrapper):
            if outer._inner is self:
                outer._inner = self._inner
            outer = outer._inner
