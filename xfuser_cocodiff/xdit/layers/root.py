"""The transformer that attention layers stand in, and its calls: which branch of a step they are."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Root:
    """A transformer, as a whole, during a call.

    Args:
        transformer: it is being called.
        args, kwargs: what it was given.
        active: whether calls are to be counted just now.
        called: told of each call before it is counted, and of what it is given.
    """

    def __init__(
        self,
        transformer: nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
        active: Callable[[], bool],
        called: Callable[["Root", tuple, dict[str, Any]], None],
    ) -> None:
        self._transformer, self._active, self._called = weakref.ref(transformer), active, called
        self.run: Any = None
        """The run that the call under way belongs to, if codecs may act in it."""
        self.calls = 0
        """Since the step began, the one under way among them."""
        self.serial = 0
        """The same, since ever."""
        self._begins(transformer, args, kwargs)
        self._hook = transformer.register_forward_pre_hook(self._begins, with_kwargs=True)

    def _begins(self, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._active():
            self._called(self, args, kwargs)
            self.calls += 1
            self.serial += 1
            self.shapes = _shapes(kwargs)
            """Of the tensors that it was given by name in its last call."""

    @property
    def transformer(self) -> nn.Module:
        """The transformer itself, which may go before this does."""
        return self._transformer()

    def remove(self) -> None:
        """Leave the transformer as it was."""
        self._hook.remove()


def _shapes(arguments: dict[str, Any]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in arguments.items() if torch.is_tensor(value)}
