"""A virtual ring, against its definition: K and V from other slow coordinates are decoded values."""

import pytest
import torch
from torch.nn import functional

from xfuser_cocodiff.engine.compression.codecs import EXACT, Codec
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats, LayerCodecs
from xfuser_cocodiff.engine.compression.virtual_ranks import VirtualRing
from xfuser_cocodiff.engine.topology.topology import Topology

PARTS = (8, 3, 16)
"""Tokens of three segments; the second is not divisible by four ranks."""
CODEC = Codec(2, is_keyframe=True)


def tensor(seed: int) -> torch.Tensor:
    return torch.randn(2, 3, sum(PARTS), 16, generator=torch.Generator().manual_seed(seed))


def codecs_of(codec: Codec) -> LayerCodecs:
    return LayerCodecs(None, {"q": EXACT, "k": codec, "v": codec, "o": EXACT}, {}, CodecStats())


@pytest.mark.parametrize(
    ("sizes", "slow", "slow_indices"), [("2x2", "node", [0, 0, 1, 1]), ("2x2", "gpu", [0, 1, 0, 1])]
)
def test_virtual_ring_equals_its_definition(sizes: str, slow: str, slow_indices: list[int]) -> None:
    ring, layer_codecs = VirtualRing(Topology.parse(sizes), (slow,)), codecs_of(CODEC)
    query, key, value = map(tensor, range(3))
    attention = functional.scaled_dot_product_attention
    found = ring.attend([query, key, value], PARTS, layer_codecs, attention)
    ranks = [*[0] * 2, *[1] * 2, *[2] * 2, *[3] * 2, *[None] * 3, *[0] * 4, *[1] * 4, *[2] * 4, *[3] * 4]
    references = {name: layer_codecs.link_states[name, (0, 1)].sent.predict() for name in "kv"}
    # Each rank has two tokens of the first segment and four of the last.
    assert references["k"].shape == (4, 2, 3, 6, 16)
    for rank in range(4):
        received = []
        for name, exact in (("k", key), ("v", value)):
            mine = exact.clone()
            for other in range(4):
                if slow_indices[other] != slow_indices[rank]:
                    mine[:, :, [token for token, owner in enumerate(ranks) if owner == other]] = references[name][other]
            received.append(mine)
        own = [token for token, owner in enumerate(ranks) if owner == rank]
        assert torch.allclose(found[:, :, own], attention(query[:, :, own], *received), atol=1e-6)
    stats = layer_codecs.stats
    assert stats.exact_bytes == 4 * 2 * 2 * 3 * 6 * 16 * 4 and stats.sent_bytes < 0.15 * stats.exact_bytes


def test_exact_ring_equals_attention_and_repeats_infinite_values() -> None:
    ring = VirtualRing(Topology.parse("2x2"), ("node",))
    query, key, value = map(tensor, range(3))
    expected = functional.scaled_dot_product_attention(query, key, value)
    found = ring.attend([query, key, value], PARTS, codecs_of(EXACT), functional.scaled_dot_product_attention)
    assert torch.equal(found, expected)
    value[0, 0, 0, 0] = torch.inf
    layer_codecs = codecs_of(CODEC)
    ring.attend([query, key, value], PARTS, layer_codecs, functional.scaled_dot_product_attention)
    assert layer_codecs.stats.repeated == 1
