"""Tensors that are made when somebody needs them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from xfuser_cocodiff.xdit.layers.deferred import Deferred, has_parallel_mlp

ONE, OTHER = torch.randn(2, 3), torch.randn(2, 3)


@pytest.mark.parametrize(
    "use",
    [
        lambda tensor: torch.cat([OTHER, tensor], 1),
        lambda tensor: torch.cat((tensor, tensor)),
        lambda tensor: OTHER + tensor,
        lambda tensor: torch.add(OTHER, other=tensor),
        lambda tensor: torch.split(tensor, 1, dim=-1)[2],
        lambda tensor: nn.functional.gelu(tensor, approximate="tanh"),
        lambda tensor: tensor.chunk(3, -1)[1],
        lambda tensor: 2 * tensor + tensor * 3 - tensor / 2,
        lambda tensor: tensor[..., :2],
        lambda tensor: -tensor @ OTHER.T,
        lambda tensor: torch.stack(list(tensor)) * len(tensor),
        lambda tensor: torch.tensor(tensor.shape),
    ],
)
def test_whatever_needs_a_tensor_makes_it_once(use: Callable) -> None:
    calls: list[int] = []
    later = Deferred(lambda: calls.append(1) or ONE)
    assert not calls
    for _ in range(2):
        assert torch.equal(use(later), use(ONE))
    assert calls == [1]


def test_what_fails_fails_again() -> None:
    later = Deferred(lambda: ONE @ OTHER)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            later + 1


def test_a_block_with_somebody_listening_has_none() -> None:
    block = nn.Module()
    block.proj_mlp, block.act_mlp = nn.Linear(2, 2), nn.GELU()
    assert has_parallel_mlp(block)
    hook = block.act_mlp.register_forward_hook(lambda *_: None)
    assert not has_parallel_mlp(block)
    hook.remove()
    block.proj_mlp._hf_hook = object()
    assert not has_parallel_mlp(block)
    assert not has_parallel_mlp(nn.Linear(2, 2))
