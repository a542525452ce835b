"""The attention layers of this process: found from the one that runs, and followed from then on."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from xfuser_cocodiff.xdit.layers.layer import Layer, Shared
from xfuser_cocodiff.xdit.layers.module_stack import arguments_of, running_modules
from xfuser_cocodiff.xdit.layers.root_module import WRAPPER, BaseLayer, RootModule


@dataclass(eq=False)
class Layers(Shared):
    """The attention layers of this process."""

    counting: Callable[[], bool] = lambda: True
    """Whether calls are to be counted just now."""
    called: Callable[[RootModule, tuple, dict[str, Any]], None] = lambda *_: None
    """Told of each call of a transformer before it is counted, and of its arguments."""
    # Only their modules hold them, so that a transformer that is not needed any more can go.
    _layers: weakref.WeakValueDictionary[int, Layer] = field(init=False, default_factory=weakref.WeakValueDictionary)
    _roots: weakref.WeakValueDictionary[int, RootModule] = field(
        init=False, default_factory=weakref.WeakValueDictionary
    )

    def discover(self) -> None:
        """Follow, from their next call on, all modules of the class of the one that runs, in the same transformer."""
        running = list(running_modules())
        # Else its forward is called as no module's is.
        if running and not is_wrapper(running[0]) and self._of(running[0]) is None:
            module, root = running[0], self._root_of(running)
            transformer = root.transformer
            for name, other in transformer.named_modules():
                if type(other) is type(module) and self._of(other) is None:
                    block = transformer.get_submodule(name.rpartition(".")[0])
                    self._layers[id(other)] = layer = Layer(name, other, block, root, self)
                    layer.install()

    def _root_of(self, running: Sequence[nn.Module]) -> RootModule:
        """The transformer of modules that run, innermost first."""
        transformer = next(module for module in reversed(running) if not is_wrapper(module))
        root = self._roots.get(id(transformer))
        if root is None or root.transformer is not transformer:
            root = self._roots[id(transformer)] = RootModule(transformer, self.counting, self.called)
        if not root.is_watching(running[-1]):
            root.watch(running[-1], *arguments_of(running[-1]))
        return root

    def traced_layer(self, path: str) -> BaseLayer | None:
        """Return the layer that a graph runs for, traced at a path; None where no module is called."""
        running = list(running_modules())
        if all(map(is_wrapper, running)):
            return None
        layer = self._root_of(running).traced_layer(running, path)
        layer.count_call()
        return layer

    def running_layer(self) -> Layer | None:
        """The layer whose module runs, though its call is not followed."""
        return next(filter(None, map(self._of, running_modules())), None)

    def _of(self, module: nn.Module) -> Layer | None:
        """The layer of a module, and not of one that has gone, whose number was given anew."""
        layer = self._layers.get(id(module))
        return layer if layer and layer.belongs_to(module) else None

    def end_step(self) -> None:
        """A denoising step is over, or a run begins: branches are counted anew."""
        for root in self._roots.values():
            root.calls = 0

    def begin_run(self) -> None:
        """A run begins: all rehearse again where somebody has put hooks on a projection of V since, on any rank. All
        ranks call this."""
        rehearsed = [signature for signature in self.signatures if signature.recipe]
        if not rehearsed:
            return
        has_new_hooks = any(layer.has_new_hooks for layer in list(self._layers.values()))
        if not self.agreed(has_new_hooks) or has_new_hooks:
            for signature in rehearsed:
                signature.rehearsed, signature.recipe = False, None
                signature.rehearsed_by.clear()

    def clear(self) -> None:
        """Forget all layers, and leave their modules as they were."""
        for layer in reversed(list(self._layers.values())):  # what was put around something goes before it
            layer.remove()
        for root in self._roots.values():
            root.remove()
        self._layers.clear()
        self._roots.clear()
        self.signatures.clear()
        self.current = None


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module only compiles another one."""
    return WRAPPER in module._modules
