"""Modules whose forward is running, found on the stack of their thread, and what they are given."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def _calls() -> Iterator[dict[str, Any]]:
    """Of the modules whose forward is running, innermost first: `self`, `args` and `kwargs`."""
    frame = sys._getframe(1)
    while frame is not None:
        # Only in these: a look at a frame's locals keeps them alive for as long as the frame.
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:
            yield frame.f_locals
        frame = frame.f_back


_WITHIN_LAYERS = "xfuser.core.long_ctx_attention"
"""Where xDiT has attention as modules that are no layers: some of them are made anew for each call."""


def running_modules() -> Iterator[nn.Module]:
    """Innermost first."""
    modules = (call["self"] for call in _calls())
    return (module for module in modules if not type(module).__module__.startswith(_WITHIN_LAYERS))


def arguments_of(module: nn.Module) -> tuple[tuple, dict[str, Any]]:
    """What a module that runs was given."""
    return next(((call["args"], call["kwargs"]) for call in _calls() if call["self"] is module), ((), {}))


def named(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call of a module by their names."""
    return dict(zip(_names(type(module).forward), args, strict=False)) | kwargs


@functools.cache
def _names(forward: Callable) -> list[str]:
    return [*inspect.signature(forward).parameters][1:]
