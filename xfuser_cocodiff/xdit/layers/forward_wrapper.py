"""A replacement of a module's forward that sees how each call ends: hooks do not see an interrupt."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class ForwardWrapper:
    """A replacement of a module's forward.

    It does not hold the module: a cycle would keep its weights until the garbage collector runs.

    Args:
        module: its forward is replaced at once.
        call: called instead, with the original forward and its arguments.
    """

    def __init__(self, module: nn.Module, call: Callable) -> None:
        self._module, self._call = weakref.ref(module), call
        self._inner: Callable | None = vars(module).get("forward")
        """The forward that the instance had; None where it had its class's."""
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._forward, *args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._inner is not None:
            return self._inner(*args, **kwargs)
        module = self._module()
        return type(module).forward(module, *args, **kwargs)

    def __reduce__(self) -> tuple:
        """Let a copy of the module have the original forward."""
        if isinstance(self._inner, ForwardWrapper):
            return self._inner.__reduce__()
        return (getattr, (self._module(), "forward")) if self._inner is None else (_identity, (self._inner,))

    def remove(self) -> None:
        """Restore the original forward; a wrapper around this one keeps its place."""
        self._call = lambda forward, *args, **kwargs: forward(*args, **kwargs)
        module = self._module()
        outer = vars(module).get("forward") if module is not None else None
        if outer is self:
            del module.forward
            if self._inner is not None:
                module.forward = self._inner
        while isinstance(outer, ForwardWrapper):
            if outer._inner is self:
                outer._inner = self._inner
            outer = outer._inner


def _identity(forward: Callable) -> Callable:
    return forward
