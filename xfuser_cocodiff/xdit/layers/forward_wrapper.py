"""What stands in the place of a module's forward, and sees how each call ends: hooks do not see an interrupt."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class ForwardWrapper:
    """Calls something in the place of a module's forward.

    It does not hold the module: a cycle would keep its weights until the garbage collector runs.

    Args:
        module: its forward is replaced from here on.
        call: is given the forward, and what that is given.
    """

    def __init__(self, module: nn.Module, call: Callable) -> None:
        self._module, self._call = weakref.ref(module), call
        self._before: Callable | None = vars(module).get("forward")
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._forward, *args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            return self._before(*args, **kwargs)
        module = self._module()
        return type(module).forward(module, *args, **kwargs)

    def __reduce__(self) -> tuple:
        """A copy of the module has the forward that the module had."""
        if isinstance(self._before, ForwardWrapper):
            return self._before.__reduce__()
        return (getattr, (self._module(), "forward")) if self._before is None else (_itself, (self._before,))

    def remove(self) -> None:
        """Leave the module as it was; where others have put theirs around it, it does nothing any more."""
        self._call = lambda forward, *args, **kwargs: forward(*args, **kwargs)
        module = self._module()
        outer = vars(module).get("forward") if module is not None else None
        if outer is self:
            del module.forward
            if self._before is not None:
                module.forward = self._before
        while isinstance(outer, ForwardWrapper):
            if outer._before is self:
                outer._before = self._before
            outer = outer._before


def _itself(forward: Callable) -> Callable:
    return forward
