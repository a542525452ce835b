"""The transformer that attention layers stand in, and its calls: which branch of a step they are.

Layers in compiled graphs are no modules any more when they run. What is left of them is the path that they had where
the graph was traced: in the transformer, or in one of its blocks where these are compiled one by one. Blocks that are
alike then share a graph, and the stack tells which of them runs.
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

WRAPPER = "_orig_mod"
"""What torch.compile calls a module inside of the one that it makes."""


class RootModule:
    """A transformer, as a whole, during a call.

    Args:
        transformer: it is being called.
        active: whether calls are to be counted just now.
        called: told of each call before it is counted, and of what it is given.
    """

    def __init__(
        self,
        transformer: nn.Module,
        active: Callable[[], bool],
        called: Callable[["RootModule", tuple, dict[str, Any]], None],
    ) -> None:
        self._transformer, self._active, self._called = weakref.ref(transformer), active, called
        self.run: Any = None
        """The run that the call under way belongs to, if codecs may act in it."""
        self.calls = 0
        """Since the step began, the one under way among them."""
        self.serial = 0
        """The same, since ever."""
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        """Of modules of the transformer, once a layer in a graph was met."""
        self._traced: dict[tuple[str, str], BaseLayer] = {}
        """Layers in graphs, by the module whose graph runs, and by path in it."""
        self._hooks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple:
        """A copy of the transformer brings one that hears of nothing."""
        return RootModule, (nn.Identity(), bool, bool)

    def is_watching(self, outer: nn.Module) -> bool:
        """Whether it hears of calls of the outermost module; see :meth:`watch`."""
        compiled = outer._compiled_call_impl
        return outer in self._hooks if compiled is None else isinstance(compiled, _CountedCall)

    def watch(self, outer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Hear of its calls from now on, and of the one under way if that was not heard of.

        Args:
            outer: the transformer, or the module by which it is compiled: there is nothing to be heard in a graph. One
                that was compiled in place has its hooks in there.
            args, kwargs: what it was given.
        """
        self._begins(outer, args, kwargs)
        if (compiled := outer._compiled_call_impl) is not None:
            outer._compiled_call_impl = _CountedCall(compiled, outer, self)
        else:
            self._hooks[outer] = outer.register_forward_pre_hook(self._begins, with_kwargs=True)

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

    def traced_layer(self, running: Sequence[nn.Module], path: str) -> "BaseLayer":
        """Return the layer that a graph runs for.

        Args:
            running: modules, innermost first; the first that is known in the transformer is the one whose graph runs.
            path: where the layer was traced.
        """
        if not any(module in self._names for module in running):
            self._names.update((module, name) for name, module in self.transformer.named_modules())
        place = next(self._names[module] for module in running if module in self._names), path
        if place not in self._traced:
            self._traced[place] = BaseLayer(self._name(*place), self)
        return self._traced[place]

    def _name(self, outer: str, path: str) -> str:
        parts = [part for part in (*outer.split("."), *path.split(".")) if part not in ("", WRAPPER)]
        # Tracing ends somewhere inside of the module, such as in a norm.
        for end in range(len(parts), 0, -1):
            with contextlib.suppress(AttributeError):  # there is no such module
                self.transformer.get_submodule(name := ".".join(parts[:end])).processor  # noqa: B018
                return name
        return ".".join(parts)

    def remove(self) -> None:
        """Leave the transformer as it was."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        transformer = self.transformer
        if transformer is not None and isinstance(transformer._compiled_call_impl, _CountedCall):
            transformer._compiled_call_impl = transformer._compiled_call_impl.compiled


class _CountedCall:
    """The call of a transformer that was compiled in place, of which its root hears."""

    def __init__(self, compiled: Callable, transformer: nn.Module, root: RootModule) -> None:
        self.compiled, self._transformer, self._root = compiled, weakref.ref(transformer), root

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._root._begins(self._transformer(), args, kwargs)
        return self.compiled(*args, **kwargs)


def _shapes(arguments: dict[str, Any]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in arguments.items() if torch.is_tensor(value)}


class BaseLayer:
    """A place in a transformer where attention is called.

    Args:
        name: in the transformer.
        root: the transformer.
    """

    def __init__(self, name: str, root: RootModule) -> None:
        self.name, self.root = name, root
        self.call: Any = None
        """The one under way."""
        self.is_repeated = False
        """Whether this is not its first call within a call of the transformer."""
        self._serial = 0

    def count_call(self) -> None:
        """Count a call."""
        self.is_repeated, self._serial = self._serial == self.root.serial, self.root.serial

    @property
    def branch(self) -> int:
        """Which call of the transformer in this step this is: its branch of classifier-free guidance."""
        return self.root.calls - 1
