"""Deferred tensors: computed once, when they are first used."""

from collections.abc import Callable

import pytest
import torch

from xfuser_cocodiff.xdit.layers.deferred import Deferred

ONE, OTHER = torch.randn(2, 3), torch.randn(2, 3)


@pytest.mark.parametrize(
    "use",
    [
        lambda tensor: torch.cat([OTHER, tensor], 1),
        lambda tensor: torch.add(OTHER, other=tensor),
        lambda tensor: tensor.chunk(3, -1)[1],
        lambda tensor: 2 * tensor + tensor * 3 - tensor / 2,
        lambda tensor: -tensor @ OTHER.T,
        lambda tensor: torch.stack(list(tensor)) * len(tensor),
    ],
)
def test_any_use_computes_the_tensor_once(use: Callable) -> None:
    calls: list[int] = []
    deferred = Deferred(lambda: calls.append(1) or ONE)
    assert not calls
    for _ in range(2):
        assert torch.equal(use(deferred), use(ONE))
    assert calls == [1]
