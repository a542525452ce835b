"""All attention layers of a session, found when the first of them runs, and wrapped from then on."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.xdit.layers.call_wrapper import CallWrapper, is_wrapped
from xfuser_cocodiff.xdit.layers.layer import Layer, LayerContext
from xfuser_cocodiff.xdit.layers.layer_call import LayerCall
from xfuser_cocodiff.xdit.layers.module_stack import arguments_of, running_modules
from xfuser_cocodiff.xdit.layers.root_module import WRAPPER, BaseLayer, RootModule, layer_name


@dataclass(eq=False)
class Layers(LayerContext):
    """All attention layers of a session."""

    current: BaseLayer | None = field(init=False, default=None)
    """The layer whose attention runs."""
    _roots: weakref.WeakKeyDictionary[nn.Module, RootModule] = field(
        init=False, default_factory=weakref.WeakKeyDictionary
    )
    """Transformers with their layers; weak, so that their memory can be freed."""
    _transformers: weakref.WeakSet[CallWrapper] = field(init=False, default_factory=weakref.WeakSet)
    """Wrappers of transformers, which hold them."""

    @contextmanager
    def in_usp(self, value: torch.Tensor) -> Iterator[Handle | None]:
        """Have the running layer as :attr:`current` in a call of USP.

        Yields:
            Handle of V if the layer has started its all-to-all before USP was called. The layer drains it at the end of
            its call if it has not been waited for.

        Args:
            value: V as USP is given it, shape (B, H, S/P, D).
        """
        layer = self.current = self.find_layer()
        try:
            if layer is None:
                yield None
            elif layer.call:
                yield layer.claim_v_handle(value)
            else:
                with layer.new_call(*arguments_of(layer.module)):
                    layer.call.signature.structure.reaches_usp = True
                    yield None
        finally:
            self.current = None

    def find_layer(self) -> Layer | None:
        """Return the layer whose module runs; None outside of any module. With the first one, all modules of its class
        in its transformer are found, and wrapped from their next call on."""
        return self._running_layer(None)

    @contextmanager
    def in_graph(self, path: str) -> Iterator[None]:
        """Have the layer of a graph that runs as :attr:`current`; none where the graph runs outside of any module.

        Args:
            path: where the layer was traced.
        """
        self.current = layer = self._running_layer(path)
        if layer:
            layer.count_call()
            layer.call = LayerCall(OverlapSchedule())
        try:
            yield
        finally:
            self.current = None
            if layer:
                layer.call = None

    def _running_layer(self, path: str | None) -> Any:
        """Return the running layer, in the graph of the innermost module of a transformer if a path is given."""
        running = list(running_modules())
        if all(map(is_compiler, running)):
            return None
        root = self._root_of(running)
        module = next(module for module in running if module in root.names)
        key = root.names[module], path
        if key not in root.layers and path is None:
            same_type = [(other, name) for other, name in root.names.items() if type(other) is type(module)]
            root.layers |= {(name, None): Layer(name, other, root, self) for other, name in same_type}
        elif key not in root.layers:
            root.layers[key] = BaseLayer(layer_name(root.transformer, f"{key[0]}.{path}"), root)
        return root.layers[key]

    def _root_of(self, running: Sequence[nn.Module]) -> RootModule:
        """Return the transformer of running modules, which are given innermost first, and count its calls."""
        transformer = next(module for module in reversed(running) if not is_compiler(module))
        if transformer not in self._roots:
            self._roots[transformer] = RootModule(transformer, self.session)
        root = self._roots[transformer]
        outer = running[-1]  # the transformer, or torch.compile's wrapper of it
        if not is_wrapped(outer, root.call_transformer):
            root.count_call(*arguments_of(outer))
            self._transformers.add(CallWrapper(outer, root.call_transformer))
        return root

    def end_step(self) -> None:
        """Count branches from zero: a denoising step has ended, or a run begins."""
        for root in self._roots.values():
            root.calls = 0

    def unwrap_layers(self) -> None:
        """Restore all modules but transformers. Layers that run again are wrapped again."""
        self.unwrap()
        for root in self._roots.values():
            root.layers.clear()

    def clear(self) -> None:
        """Restore all modules, and drop the layers."""
        self.unwrap_layers()
        for wrapper in list(self._transformers):
            wrapper.remove()
        self._roots.clear()
        self.signatures.clear()
        self.current = None


def is_compiler(module: nn.Module) -> bool:
    """Return whether a module is torch.compile's wrapper of another one."""
    return WRAPPER in module._modules
