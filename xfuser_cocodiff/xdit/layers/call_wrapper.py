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
        self._module = weakref.ref(module)
        self._call: Callable | None = call
        self._inner = module._compiled_call_impl
        """The call that the module had in place of its class's, as of torch.compile."""
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.original, *args, **kwargs) if self._call else self.original(*args, **kwargs)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as without this wrapper."""
        return (self._inner or self._module()._call_impl)(*args, **kwargs)

    def remove(self) -> None:
        """Restore the original call, once the wrappers around this one are removed, too."""
        self._call = None
        module = self._module()
        while module is not None and is_wrapped(module) and module._compiled_call_impl._call is None:
            inner = vars(module).pop("_compiled_call_impl")._inner
            if inner is not None:
                module._compiled_call_impl = inner


def is_wrapped(module: nn.Module, call: Callable | None = None) -> bool:
    """Return whether the call of a module is replaced: by this one, or by any."""
    outer = module._compiled_call_impl
    while isinstance(outer, CallWrapper):
        if call in (None, outer._call):
            return True
        outer = outer._inner
    return False
