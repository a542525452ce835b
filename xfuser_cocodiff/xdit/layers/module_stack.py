"""Modules whose forward is running, found on the call stack, with their arguments."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_WITHIN_LAYERS = "xfuser.core.long_ctx_attention"
"""Package whose modules are a part of attention and no layers; xDiT creates some of them for each call."""


def running_modules() -> Iterator[nn.Module]:
    """Yield the modules whose forward is running, innermost first."""
    modules = (call["self"] for call in _running_calls())
    return (module for module in modules if not type(module).__module__.startswith(_WITHIN_LAYERS))


def arguments_of(module: nn.Module) -> tuple[tuple, dict[str, Any]]:
    """Return the positional and keyword arguments of a running module; none where it does not run."""
    return next(((call["args"], call["kwargs"]) for call in _running_calls() if call["self"] is module), ((), {}))


def named_arguments(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a module by their names."""
    return dict(zip(_parameters(type(module).forward), args, strict=False)) | kwargs


def _running_calls() -> Iterator[dict[str, Any]]:
    """Yield `self`, `args` and `kwargs` of each running module, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        # Locals of no other frame are read, since reading keeps them alive as long as the frame.
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:
            yield frame.f_locals
        frame = frame.f_back


@functools.cache
def _parameters(forward: Callable) -> list[str]:
    return [*inspect.signature(forward).parameters][1:]
