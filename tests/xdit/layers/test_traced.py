"""Layers in compiled graphs, and the count of a compiled transformer's calls."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from xfuser_cocodiff.xdit.layers.layers import Layers
from xfuser_cocodiff.xdit.layers.root_module import BaseLayer

X = torch.ones(1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.processor = object()
        self.norm = nn.Identity()


class Graph(nn.Module):
    """A graph in which layers are called."""

    def __init__(self, call_layers: Callable) -> None:
        super().__init__()
        self.call_layers = call_layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.call_layers()
        return x


class Block(Graph):
    def __init__(self, call_layers: Callable) -> None:
        super().__init__(call_layers)
        self.attn, self.cross = Attention(), Attention()


class Transformer(Graph):
    def __init__(self, call_layers: Callable = lambda: None, of_blocks: Callable = lambda: None) -> None:
        super().__init__(call_layers)
        self.blocks = nn.ModuleList(Block(of_blocks) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return super().forward(x)


class Wrapper(nn.Module):
    """The wrapper that torch.compile returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(*args)


def graph_layer(layers: Layers, path: str) -> BaseLayer:
    with layers.in_graph(path):
        return layers.current


def new_layers(before_call: Callable = lambda *_: None) -> Layers:
    return Layers(SimpleNamespace(counts_calls=lambda: True, before_call=before_call), may_overlap=True)


@pytest.mark.parametrize("path", ["blocks.1.attn", "blocks.1.attn.norm"])
def test_a_layer_in_a_graph_is_named_by_its_path(path: str) -> None:
    layers, found = new_layers(), []
    transformer = Transformer(lambda: found.append([graph_layer(layers, each) for each in (path, "blocks.1.cross")]))
    transformer(X)
    transformer(X)
    (first, other), (second, _) = found
    assert first.name == "blocks.1.attn" and other.name == "blocks.1.cross" and first is second
    assert (first.branch, first.is_repeated) == (1, False)


def test_blocks_that_share_a_graph_have_their_own_layers() -> None:
    layers, names = new_layers(), []
    # Some backends run graphs as modules, which the transformer does not know.
    graph = Graph(lambda: names.append(graph_layer(layers, "attn").name))
    transformer = Transformer(of_blocks=lambda: graph(X))
    transformer.blocks = nn.ModuleList(map(Wrapper, transformer.blocks))
    transformer(X)
    assert names == [f"blocks.{index}.attn" for index in range(3)]


@pytest.mark.parametrize("how", ["eager", "whole", "in place", "in place later"])
def test_calls_of_a_compiled_transformer_are_counted(how: str) -> None:
    called, found = [], []
    layers = new_layers(lambda root, args, kwargs: called.append(args))
    transformer = Transformer(lambda: found.append(graph_layer(layers, "blocks.0.attn")))
    outer = Wrapper(transformer) if how == "whole" else transformer
    if how == "in place":
        transformer._compiled_call_impl = transformer._call_impl
    outer(X)
    if how == "in place later":
        transformer._compiled_call_impl = transformer._call_impl
    outer(X)
    assert outer(X) is X
    [root] = {layer.root for layer in found}
    assert root.calls == root.total_calls == 3 and called == [(X,)] * 3
    layers.clear()
    transformer.call_layers = lambda: None
    outer(X)
    assert root.calls == 3
