"""CompactFusion's ring: error feedback on real ranks, its quantizer, and shapes without values."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as collectives
from torch.nn.functional import scaled_dot_product_attention

from tests import ranks
from xfuser_cocodiff.lab.cluster_bench.coding_kernels import decode_residual, encode_residual, residual_bytes
from xfuser_cocodiff.lab.cluster_bench.ring_rules import ResidualRing, _scales, gathered_attention

SHAPE = (1, 2, 6, 8)


def blocks(rank: int, step: int, layer: int) -> list[torch.Tensor]:
    """Return K and V of a rank, which drift from step to step."""
    generator = torch.Generator().manual_seed(10 * rank + layer)
    start, drift = torch.randn(2, 2, *SHAPE, generator=generator)
    return [*(start + 0.05 * step * drift)]


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
    """Return O and the log-sum-exp of the scores."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def run_steps(rank: int, steps: int) -> tuple[dict, list[float]]:
    """Return what this rank holds of all ranks after some steps, and the error of O in each step."""
    ring, errors = ResidualRing(dist.group.WORLD), []
    world = dist.get_world_size()
    for step in range(steps):
        ring.begin_step()
        for layer in range(2):
            query = torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank))
            output = ring.attend(attention, query, *blocks(rank, step, layer), {})
            others = [blocks(other, step, layer) for other in range(world)]
            whole = [torch.cat(parts, 2) for parts in zip(*others, strict=True)]
            expected = scaled_dot_product_attention(query, *whole)
            errors.append(((output - expected).norm() / expected.norm()).item())
    return ring._bases, errors


def test_senders_and_receivers_hold_the_same() -> None:
    results = ranks.run(run_steps, 3, 4)
    for layer in (1, 2):
        for source in range(3):
            held = [bases[layer, source] for bases, _ in results]
            assert all(torch.equal(each, held[source]) for each in held)
            sent = torch.stack(blocks(source, 3, layer - 1))
            # Errors do not add up: without feedback they would exceed what changed.
            drift = torch.stack(blocks(source, 3, layer - 1)) - torch.stack(blocks(source, 0, layer - 1))
            assert 0 < (held[source] - sent).norm() < 0.5 * drift.norm()
    for _, errors in results:
        assert max(errors[:2]) < 1e-6  # the first step is exact
        assert all(1e-4 < error < 0.1 for error in errors[2:])


def test_residuals_have_four_levels_around_their_scale() -> None:
    values, base = torch.stack(blocks(0, 9, 0)), torch.stack(blocks(0, 0, 0))
    channel, token = _scales(values, base)
    magnitude = (values - base).abs()
    torch.testing.assert_close(channel, magnitude.mean((1, 3), keepdim=True))
    message, held = encode_residual(values, base, channel, token)
    assert message.dtype == torch.uint8 and len(message) == residual_bytes((2, *SHAPE))
    assert torch.equal(decode_residual(message, base), held)
    scale = channel.half().float() * token.half().float()
    levels = torch.tensor([-2, -0.5, 0.5, 2])
    torch.testing.assert_close(((held - base) / scale)[..., None].sub(levels).abs().amin(-1), torch.zeros(2, *SHAPE))
    is_large = magnitude > scale
    torch.testing.assert_close((held - base).abs(), torch.where(is_large, 2.0, 0.5) * scale, rtol=1e-3, atol=1e-6)
    assert torch.equal((held - base).sign(), torch.where(values >= base, 1.0, -1.0))


class FakeGroup:
    """Group of four ranks whose collectives return tensors of the right shape."""

    def size(self) -> int:
        return 4

    def rank(self) -> int:
        return 1


def test_rings_need_no_values() -> None:
    def attend(query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        return query.clone(), query.new_empty(query.shape[:-1], dtype=torch.float32)

    with (
        FakeTensorMode(),
        mock.patch.object(collectives, "permute_tensor", lambda x, *_: x.clone()),
        mock.patch.object(collectives, "all_gather_single", lambda x, *_: torch.cat([x] * 4)),
    ):
        query, key, value = (torch.empty(1, 12, 1152, 128, dtype=torch.bfloat16) for _ in range(3))
        ring = ResidualRing(FakeGroup())
        for _ in range(3):
            ring.begin_step()
            output = ring.attend(attend, query, key, value, {})
            assert output.shape == query.shape and output.dtype == torch.bfloat16
        seen: list[torch.Size] = []

        def attend_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
            seen.extend([k.shape, v.shape])
            return q, None

        gathered_attention(FakeGroup(), attend_all, query, key, value, {})
        assert seen == [(1, 12, 4 * 1152, 128)] * 2
