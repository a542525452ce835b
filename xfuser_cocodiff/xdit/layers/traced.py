"""Attention layers in compiled graphs, which are no modules any more when they run.

What is left of them is the path that they had where the graph was traced: in the transformer, or in one of its blocks
where these are compiled one by one. Blocks that are alike then share a graph, and the stack tells which of them runs.
"""

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from xfuser_cocodiff.attention.schedule import Schedule
from xfuser_cocodiff.codec.layer_codecs import LayerCodecs
from xfuser_cocodiff.exchange.lane import Handle
from xfuser_cocodiff.xdit.layers.kind import Kind
from xfuser_cocodiff.xdit.layers.root import Place, Root

_WRAPPER = "_orig_mod"
"""What torch.compile calls a module inside of the one that it makes."""


@dataclass(eq=False)
class TracedCall:
    """A call of a layer that is under way."""

    layer: "TracedLayer | None"
    """None where no module is called, of which there is nothing to learn then."""
    kind: Kind | None
    schedule: Schedule
    layer_codecs: LayerCodecs | None = None
    """How its exchanges are encoded, once one of them was."""
    value: Handle[list[torch.Tensor]] | None = None
    """The exchange of V of the first head group, where that goes first."""
    coming: list[Handle[list[torch.Tensor]]] = field(default_factory=list)
    """The exchanges of Q, K and V, for each head group."""
    going: list[Handle[None]] = field(default_factory=list)
    """Those of O."""
    result: torch.Tensor | None = None
    """Where O arrives."""

    @property
    def name(self) -> str:
        """Of the layer."""
        return self.layer.name if self.layer else ""

    def end(self) -> torch.Tensor:
        """It has ended: O. A refresh says nothing of what other steps take."""
        if self.layer:
            self.layer.call = None  # which would hold O
        is_refresh = self.layer_codecs is not None and self.layer_codecs.owes_nothing
        if self.kind and self.kind.trial:
            self.kind.trial.ran(is_usual=not is_refresh)
        return self.result

    def abandon(self) -> None:
        """Bring what is under way to its end: peers take part in it."""
        under_way: list[Handle[Any]] = [*([self.value] if self.value else []), *self.coming, *self.going]
        for handle in under_way:
            handle.abandon()


class UnderWay:
    """Calls that are under way, by numbers that graphs can hand on."""

    def __init__(self) -> None:
        self._calls: dict[int, TracedCall] = {}
        self._numbers = itertools.count()

    def add(self, call: TracedCall) -> int:
        """A call begins; its number."""
        number = next(self._numbers)
        self._calls[number] = call
        return number

    def __getitem__(self, number: int) -> TracedCall:
        return self._calls[number]

    def end(self, number: int) -> TracedCall:
        """A call ends."""
        return self._calls.pop(number)

    def clear(self) -> None:
        """End those that an error has left."""
        while self._calls:
            self._calls.popitem()[1].abandon()


class TracedLayer(Place):
    """An attention layer of a graph."""

    call: TracedCall | None = None
    """The one under way."""


@dataclass
class TracedLayers:
    """Those of one transformer.

    Args:
        root: the transformer.
    """

    root: Root
    _layers: dict[str, TracedLayer] = field(default_factory=dict)
    _modules: weakref.WeakKeyDictionary[nn.Module, str] = field(default_factory=weakref.WeakKeyDictionary)
    """Names of modules."""
    _names: dict[tuple[str, str], str] = field(default_factory=dict)
    """By the module whose graph runs, and by path in it."""
    _counted: tuple[int, str] = 0, ""
    """Call of the transformer, and module, in which layers without a path were counted."""
    _count: int = 0

    def at(self, running: Sequence[nn.Module], path: str) -> TracedLayer:
        """The layer that is called.

        Args:
            running: modules, innermost first; the first that is known in the transformer is the one whose graph runs.
            path: where the layer was traced; nothing where that is not known, and layers are told by their order.
        """
        if not any(module in self._modules for module in running):
            self._modules.update((module, name) for name, module in self.root.transformer.named_modules())
        outer = next(self._modules[module] for module in running if module in self._modules)
        if not path:
            counted = self.root.serial, outer
            self._count = self._count + 1 if counted == self._counted else 0
            self._counted, path = counted, f"attention{self._count}"
        if (outer, path) not in self._names:
            self._names[outer, path] = self._name(outer, path)
        name = self._names[outer, path]
        if name not in self._layers:
            self._layers[name] = TracedLayer(name, self.root)
        return self._layers[name]

    def _name(self, outer: str, path: str) -> str:
        parts = [part for part in (*outer.split("."), *path.split(".")) if part not in ("", _WRAPPER)]
        # Tracing ends somewhere inside of the module, such as in a norm.
        for end in range(len(parts), 0, -1):
            if hasattr(_submodule(self.root.transformer, parts[:end]), "processor"):
                return ".".join(parts[:end])
        return ".".join(parts)


def _submodule(module: nn.Module, parts: list[str]) -> nn.Module | None:
    try:
        return module.get_submodule(".".join(parts))
    except AttributeError:
        return None


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module only compiles another one."""
    return _WRAPPER in module._modules
