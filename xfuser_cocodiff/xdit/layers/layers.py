"""All attention layers of a session, found when the first of them runs, and wrapped from then on."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.xdit.layers.layer import Layer, LayerContext
from xfuser_cocodiff.xdit.layers.module_stack import arguments_of, running_modules
from xfuser_cocodiff.xdit.layers.root_module import WRAPPER, BaseLayer, RootModule


@dataclass(eq=False)
class Layers(LayerContext):
    """All attention layers of a session."""

    counts_calls: Callable[[], bool] = lambda: True
    """Returns whether calls of transformers are to be counted at the moment."""
    before_call: Callable[[RootModule, tuple, dict[str, Any]], None] = lambda *_: None
    """Called before each call of a transformer is counted, with its arguments."""
    # Weak, so that the memory of a transformer can be freed.
    _layers: weakref.WeakKeyDictionary[nn.Module, Layer] = field(init=False, default_factory=weakref.WeakKeyDictionary)
    _roots: weakref.WeakValueDictionary[int, RootModule] = field(
        init=False, default_factory=weakref.WeakValueDictionary
    )

    @contextmanager
    def in_usp(self, value: torch.Tensor) -> Iterator[Handle | None]:
        """Have the running layer as :attr:`current` in a call of USP.

        Yields:
            Handle of V if the layer has started its all-to-all before USP was called. The layer drains it at the end of
            its call if it has not been waited for.

        Args:
            value: V as USP is given it, shape (B, H, S/P, D).
        """
        if self.current:
            yield self.current.claim_v_handle(value)
            return
        self.current = layer = self.find_layer()
        if layer is None:
            yield None
            return
        call = layer.begin_call(*arguments_of(layer.module))
        try:
            yield None
        finally:
            self.current = layer.call = None
        call.end()

    def find_layer(self) -> Layer | None:
        """Return the layer whose module runs. With the first one, all modules of its class in its transformer are
        found, and wrapped from their next call on."""
        running = list(running_modules())
        # If a forward is called directly, the running module is the one around it.
        if running and not is_wrapper(running[0]) and running[0] not in self._layers:
            module, root = running[0], self._root_of(running)
            transformer = root.transformer
            for name, other in transformer.named_modules():
                if type(other) is type(module) and other not in self._layers:
                    block = transformer.get_submodule(name.rpartition(".")[0])
                    self._layers[other] = layer = Layer(name, other, block, root, self)
                    if self.may_overlap:
                        layer.install()
        return next(filter(None, map(self._layers.get, running)), None)

    def _root_of(self, running: Sequence[nn.Module]) -> RootModule:
        """Return the transformer of running modules, which are given innermost first."""
        transformer = next(module for module in reversed(running) if not is_wrapper(module))
        root = self._roots.get(id(transformer))
        if root is None or root.transformer is not transformer:
            root = self._roots[id(transformer)] = RootModule(transformer, self.counts_calls, self.before_call)
        if not root.is_watching(running[-1]):
            root.watch(running[-1], *arguments_of(running[-1]))
        return root

    def traced_layer(self, path: str) -> BaseLayer | None:
        """Return the layer of a graph that runs, and count its call; None where the graph runs outside of any module.

        Args:
            path: where the layer was traced.
        """
        running = list(running_modules())
        if all(map(is_wrapper, running)):
            return None
        layer = self._root_of(running).traced_layer(running, path)
        layer.count_call()
        return layer

    def end_step(self) -> None:
        """Count branches from zero: a denoising step has ended, or a run begins."""
        for root in self._roots.values():
            root.calls = 0

    def clear(self) -> None:
        """Restore the modules of all layers, and drop these."""
        for layer in reversed(list(self._layers.values())):  # outer wrappers go first
            layer.remove()
        for root in self._roots.values():
            root.remove()
        self._layers.clear()
        self._roots.clear()
        self.signatures.clear()
        self.current = None


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module is torch.compile's wrapper of another one."""
    return WRAPPER in module._modules
