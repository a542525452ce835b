"""Layers in compiled graphs, and the count of a compiled transformer's calls."""

import pytest
import torch
from torch import nn

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.xdit.layers.layer_call import TracedCall
from xfuser_cocodiff.xdit.layers.root_module import RootModule
from xfuser_cocodiff.xdit.session.session import Session


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.processor = object()
        self.norm = nn.Identity()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.cross = Attention(), Attention()


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Wrapper(nn.Module):
    """The wrapper that torch.compile returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(*args)


def root_of(transformer: nn.Module) -> RootModule:
    return RootModule(transformer, lambda: True, lambda *_: None)


@pytest.mark.parametrize("path", ["blocks.1.attn", "blocks.1.attn.norm"])
def test_a_layer_in_a_graph_is_named_by_its_path(path: str) -> None:
    transformer = Transformer()
    root = root_of(transformer)
    layer = root.traced_layer([transformer], path)
    assert layer.name == "blocks.1.attn"
    assert root.traced_layer([transformer], path) is layer is not root.traced_layer([transformer], "blocks.1.cross")


def test_blocks_that_share_a_graph_have_their_own_layers() -> None:
    transformer = Transformer()
    blocks = list(transformer.blocks)
    for index, block in enumerate(blocks):
        transformer.blocks[index] = Wrapper(block)
    root = root_of(transformer)
    graph = nn.Identity()  # some backends run graphs as modules, which the transformer does not know
    names = [root.traced_layer([graph, block, transformer], "attn").name for block in blocks]
    assert names == [f"blocks.{index}.attn" for index in range(3)]


@pytest.mark.parametrize("how", ["eager", "whole", "in place"])
def test_calls_of_a_compiled_transformer_are_counted(how: str) -> None:
    transformer = Transformer()
    called: list[tuple] = []
    root = RootModule(transformer, lambda: True, lambda root, args, kwargs: called.append(args))
    outer = Wrapper(transformer) if how == "whole" else transformer
    if how == "in place":
        transformer._compiled_call_impl = lambda *args: args[0]
    x = torch.ones(1)
    root.watch(outer, (x,), {})  # during its first call
    assert root.is_watching(outer) and (root.calls, root.total_calls) == (1, 1)
    assert outer(x) is x and outer(x) is x
    assert root.calls == 3 and called == [(x,)] * 3
    root.remove()
    assert not root.is_watching(outer)
    outer(x)
    assert root.calls == 3


def test_close_drains_all_to_alls_after_an_error() -> None:
    session, ended, ulysses = Session(), [], UlyssesAttention(None)
    ulysses._inputs.append(Handle(Label("qkv"), lambda: ended.append(True)))
    session.begin_traced_call(TracedCall(OverlapSchedule(), layer=None, ulysses=ulysses))
    session.close()
    assert ended == [True] and session.traced_call is None
