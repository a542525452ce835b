"""The transformer that holds attention layers, and its calls: one for each branch of a denoising step.

In a compiled graph, layers are not modules. A layer is known by the path where it was traced: in the transformer, or in
one of its blocks where these are compiled one by one. Equal blocks then share a graph, and the stack of running modules
tells which of them runs.
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes

WRAPPER = "_orig_mod"
"""Name of the original module in torch.compile's wrapper."""


class RootModule:
    """A transformer, and the number of its calls.

    Args:
        transformer: the transformer, during a call.
        counts_calls: returns whether calls are to be counted at the moment.
        before_call: called before each call is counted, with its arguments.
    """

    def __init__(
        self,
        transformer: nn.Module,
        counts_calls: Callable[[], bool],
        before_call: Callable[["RootModule", tuple, dict[str, Any]], None],
    ) -> None:
        self._transformer, self._counts_calls, self._before_call = weakref.ref(transformer), counts_calls, before_call
        self.run: Any = None
        """The run of the current call; None where its layers are not encoded."""
        self.batched_branches = 1
        """Number of branches in the batch of the current call, if they are coded together."""
        self.calls = 0
        """Number of calls in this step, the current one included."""
        self.total_calls = 0
        """Number of calls so far, the current one included."""
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        """Paths of the transformer's modules, filled by the first layer in a graph."""
        self._traced_layers: dict[tuple[str, str], BaseLayer] = {}
        """Layers in graphs, by the path of the module whose graph runs and the path in the graph."""
        self._hooks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple:
        """Let a copy of the transformer have a root that counts nothing."""
        return RootModule, (nn.Identity(), bool, bool)

    def is_watching(self, outer: nn.Module) -> bool:
        """Return whether calls of the outermost module are counted; see :meth:`watch`."""
        compiled = outer._compiled_call_impl
        return outer in self._hooks if compiled is None else isinstance(compiled, _CountedCall)

    def watch(self, outer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Count the current call of the outermost module, and all later ones.

        Args:
            outer: the transformer, or torch.compile's wrapper of it: hooks inside of a graph would be traced. A module
                that was compiled in place has its hooks inside, so that its compiled call is wrapped instead.
            args: positional arguments of the current call.
            kwargs: keyword arguments of the current call.
        """
        self._count_call(outer, args, kwargs)
        if (compiled := outer._compiled_call_impl) is not None:
            outer._compiled_call_impl = _CountedCall(compiled, outer, self)
        else:
            self._hooks[outer] = outer.register_forward_pre_hook(self._count_call, with_kwargs=True)

    def _count_call(self, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._counts_calls():
            self._before_call(self, args, kwargs)
            self.calls += 1
            self.total_calls += 1
            self.shapes = {name: value.shape for name, value in kwargs.items() if torch.is_tensor(value)}
            """Shapes of the tensors that were passed by name to the last call."""

    @property
    def transformer(self) -> nn.Module:
        """The transformer; None once it has been freed."""
        return self._transformer()

    def traced_layer(self, running: Sequence[nn.Module], path: str) -> "BaseLayer":
        """Return the layer of a graph that runs.

        Args:
            running: running modules, innermost first; the graph is that of the first that the transformer holds.
            path: where the layer was traced.
        """
        if not any(module in self._names for module in running):
            self._names.update((module, name) for name, module in self.transformer.named_modules())
        key = next(self._names[module] for module in running if module in self._names), path
        if key not in self._traced_layers:
            self._traced_layers[key] = BaseLayer(layer_name(self.transformer, *key), self)
        return self._traced_layers[key]

    def remove(self) -> None:
        """Remove the hooks from the transformer."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        transformer = self.transformer
        if transformer is not None and isinstance(transformer._compiled_call_impl, _CountedCall):
            transformer._compiled_call_impl = transformer._compiled_call_impl.compiled


def layer_name(transformer: nn.Module, outer: str, path: str) -> str:
    """Return the longest part of a path that names an attention module: tracing ends inside of it, as in a norm.

    Args:
        transformer: the transformer.
        outer: path of the module whose graph was traced.
        path: where the layer was traced, in that module.
    """
    parts = [part for part in (*outer.split("."), *path.split(".")) if part not in ("", WRAPPER)]
    for end in range(len(parts), 0, -1):
        with contextlib.suppress(AttributeError):  # no such module, or no attention
            transformer.get_submodule(name := ".".join(parts[:end])).processor  # noqa: B018
            return name
    return ".".join(parts)


class _CountedCall:
    """The compiled call of a transformer that was compiled in place, counted by its root."""

    def __init__(self, compiled: Callable, transformer: nn.Module, root: RootModule) -> None:
        self.compiled, self._transformer, self._root = compiled, weakref.ref(transformer), root

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._root._count_call(self._transformer(), args, kwargs)
        return self.compiled(*args, **kwargs)


class BaseLayer:
    """An attention layer of a transformer, by name, in eager mode or in a graph.

    Args:
        name: path in the transformer.
        root: the transformer.
    """

    def __init__(self, name: str, root: RootModule) -> None:
        self.name, self.root = name, root
        self.call: Any = None
        """The current call."""
        self.is_repeated = False
        """Whether the layer has been called before in the current call of the transformer."""
        self.sizes: dict[torch.Size, LayerSizes] = {}
        """Sizes of its tensors in a graph, by the shape of V."""
        self._root_call = 0
        """Number of the transformer's call in which the layer was called last."""

    def count_call(self) -> None:
        """Count a call."""
        self.is_repeated = self._root_call == self.root.total_calls
        self._root_call = self.root.total_calls

    @property
    def branch(self) -> int:
        """Index of the transformer's call in this step: the branch of classifier-free guidance."""
        return self.root.calls - 1
