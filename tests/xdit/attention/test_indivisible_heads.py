"""Zero-padded heads, against attention on one rank."""

import pytest
import torch
from torch.nn import functional

from tests import ranks
from tests.quick import slow_but
from tests.xdit.attention.test_ring import ring_options, start
from xfuser_cocodiff.xdit.session.session import active


def whole(seed: int, heads: int, tokens: int) -> torch.Tensor:
    """Return a tensor (B, H, S, D), the same on every rank."""
    return torch.randn(2, heads, tokens, 8, generator=torch.Generator().manual_seed(seed))


def attend(rank: int, world: int, ring: int, heads: int, repeat: int, mode: str) -> list[float]:
    """Return the largest errors of USP, without and with replicated text."""
    from xfuser.model_executor.layers import usp

    topology = {"cocodiff_topology": f"{world}x1" if ring == 1 else f"{ring}x{world // ring}"}
    start(rank, ring_options("outer", cocodiff_a2a="hierarchical", cocodiff_mode=mode) | topology, world, ring)
    errors = []
    for joint in (False, True)[: 1 if repeat > 1 else 2]:
        tensors = [whole(seed, count, 24) for seed, count in enumerate((heads * repeat, heads, heads))]
        text = [whole(3 + seed, heads, 5) for seed in range(3)]
        options = dict(zip(("joint_query", "joint_key", "joint_value"), text, strict=True)) if joint else {}
        options |= {"joint_strategy": "rear"} if joint else {}
        options |= {"kv_head_repeat": repeat} if repeat > 1 else {}
        active().traffic.reset()
        sharded = [tensor.chunk(world, 2)[rank] for tensor in tensors]
        found = usp.USP(*sharded, **options)
        assert active().traffic.calls
        tensors = [torch.cat(pair, 2) for pair in zip(tensors, text, strict=True)] if joint else tensors
        wanted = functional.scaled_dot_product_attention(
            tensors[0], *(tensor.repeat_interleave(repeat, 1) for tensor in tensors[1:])
        )
        expected = torch.cat([wanted[:, :, :24].chunk(world, 2)[rank], wanted[:, :, 24:]], 2)
        assert found.shape == expected.shape
        errors.append((found - expected).abs().max().item())
    return errors


@pytest.mark.parametrize(
    ("world", "ring", "heads", "repeat"),
    slow_but(
        [(4, 2, 3, 1), (2, 1, 3, 2)],
        [(4, 2, 3, 1), (2, 1, 3, 2), (3, 1, 8, 1), (4, 1, 3, 2)],
    ),
)
def test_padded_heads_equal_attention(world: int, ring: int, heads: int, repeat: int) -> None:
    for errors in ranks.run(attend, world, world, ring, heads, repeat, "exact"):
        assert max(errors) < 1e-6


def attend_in_long_context(rank: int) -> float:
    """Return the largest error of yunchang's attention."""
    from xfuser.core.long_ctx_attention import xFuserLongContextAttention

    start(rank, ring_options("outer", cocodiff_mode="exact") | {"cocodiff_topology": "3x1"}, 3, 1)
    tensors = [whole(seed, 8, 24) for seed in range(3)]
    found = xFuserLongContextAttention()(None, *(tensor.transpose(1, 2).chunk(3, 1)[rank] for tensor in tensors))
    assert active().traffic.calls
    wanted = functional.scaled_dot_product_attention(*tensors).transpose(1, 2)
    return (found - wanted.chunk(3, 1)[rank]).abs().max().item()


def test_padded_heads_in_long_context_attention_equal_attention() -> None:
    assert max(ranks.run(attend_in_long_context, 3)) < 1e-6
