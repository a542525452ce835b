"""Deferred tensors: computed once, when they are first used."""

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
def test_any_use_computes_the_tensor_once(use: Callable) -> None:
    calls: list[int] = []
    deferred = Deferred(lambda: calls.append(1) or ONE)
    assert not calls
    for _ in range(2):
        assert torch.equal(use(deferred), use(ONE))
    assert calls == [1]


def test_a_failing_computation_fails_at_each_use() -> None:
    deferred = Deferred(lambda: ONE @ OTHER)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            deferred + 1


def test_an_mlp_whose_weights_diffusers_prefetches_is_not_deferred() -> None:
    block = nn.Module()
    block.proj_mlp, block.act_mlp = nn.Linear(2, 2), nn.GELU()
    block.act_mlp.register_forward_hook(lambda *_: None)
    assert has_parallel_mlp(block)
    block.proj_mlp._diffusers_hook = object()
    assert not has_parallel_mlp(block)
    assert not has_parallel_mlp(nn.Linear(2, 2))
