"""The transformer that holds attention layers, and its calls: one for each branch of a denoising step.

The stack of running modules tells which layer runs. In a compiled graph, layers are not modules: they are known by the
path where they were traced, in the transformer or in one of its blocks. Equal blocks that are compiled one by one share
a graph.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from xfuser_cocodiff.engine.comm.comm_stream import Handle

WRAPPER = "_orig_mod"
"""Name of the original module in torch.compile's wrapper."""


class LayerSession(Protocol):
    """What layers ask of the session that they belong to."""

    def counts_calls(self) -> bool:
        """Return whether calls of transformers count at the moment."""

    def overlaps(self) -> bool:
        """Return whether communication may overlap with computation at the moment."""

    def before_call(self, root: "RootModule", args: tuple, kwargs: dict[str, Any]) -> None:
        """Decide, before a call of a transformer with these arguments is counted, how its layers run."""

    def start_value(self, value: torch.Tensor, layer: Any) -> Handle:
        """Start the all-to-all of a layer's V, or of its first head group where the call has several."""


class RootModule:
    """A transformer, and the number of its calls.

    Args:
        transformer: the transformer, during a call.
        session: the session of its layers.
    """

    def __init__(self, transformer: nn.Module, session: LayerSession) -> None:
        self._transformer, self._session = weakref.ref(transformer), session
        self.run: Any = None
        """The run of the current call; None where its layers are not encoded."""
        self.calls = 0
        """Number of calls in this step, the current one included."""
        self.total_calls = 0
        """Number of calls so far, the current one included."""
        self.shapes: dict[str, torch.Size] = {}
        """Shapes of the tensors that were passed by name to the last call."""
        self.names = weakref.WeakKeyDictionary((module, name) for name, module in transformer.named_modules())
        """Paths of the transformer's modules."""
        self.layers: dict[tuple[str, str | None], BaseLayer] = {}
        """Layers by the path of the module that runs, and the path in its graph; None in eager mode."""

    @property
    def transformer(self) -> nn.Module:
        """The transformer; None once it has been freed."""
        return self._transformer()

    def call_transformer(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call the transformer, and count that."""
        self.count_call(args, kwargs)
        return original(*args, **kwargs)

    def count_call(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Count a call with these arguments."""
        if self._session.counts_calls():
            self._session.before_call(self, args, kwargs)
            self.calls += 1
            self.total_calls += 1
            self.shapes = {name: value.shape for name, value in kwargs.items() if torch.is_tensor(value)}


def layer_name(transformer: nn.Module, path: str) -> str:
    """Return the longest part of a path that names an attention module: tracing ends inside of it, as in a norm."""
    parts = [part for part in path.split(".") if part not in ("", WRAPPER)]
    for end in range(len(parts), 0, -1):
        with contextlib.suppress(AttributeError):  # no such module, or no attention
            transformer.get_submodule(name := ".".join(parts[:end])).processor  # noqa: B018
            return name
    return ".".join(parts)


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
        self._root_call = 0
        """Number of the transformer's call in which the layer was called last."""

    def count_call(self) -> None:
        """Count a call."""
        self.is_repeated = self._root_call == self.root.total_calls
        self._root_call = self.root.total_calls

    def take_deferred(self) -> list:
        """Return what may be computed while Q, K and V are in flight; nothing in a graph."""
        return []

    @property
    def branch(self) -> int:
        """Index of the transformer's call in this step: the branch of classifier-free guidance."""
        return self.root.calls - 1
