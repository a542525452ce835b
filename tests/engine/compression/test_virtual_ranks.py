"""Virtual ranks of a ring, against the definition: K and V of other places are what codecs leave of them."""

import pytest
import torch
from torch.nn import functional

from xfuser_cocodiff.engine.compression.codecs import EXACT, Codec
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats, LayerCodecs
from xfuser_cocodiff.engine.compression.virtual_ranks import VirtualRing
from xfuser_cocodiff.engine.topology.topology import Topology

PARTS = (8, 3, 16)
"""Tokens of three segments, of which the second cannot be dealt to four ranks."""
CODEC = Codec(2, is_keyframe=True)


def tensor(seed: int) -> torch.Tensor:
    return torch.randn(2, 3, sum(PARTS), 16, generator=torch.Generator().manual_seed(seed))


def codecs_of(codec: Codec) -> LayerCodecs:
    return LayerCodecs(None, {"q": EXACT, "k": codec, "v": codec, "o": EXACT}, {}, CodecStats())


@pytest.mark.parametrize(("sizes", "slow", "places"), [("2x2", "node", [0, 0, 1, 1]), ("2x2", "gpu", [0, 1, 0, 1])])
def test_a_virtual_ring_is_what_its_ranks_would_do(sizes: str, slow: str, places: list[int]) -> None:
    ring, layer_codecs = VirtualRing(Topology.parse(sizes), (slow,)), codecs_of(CODEC)
    query, key, value = map(tensor, range(3))
    attention = functional.scaled_dot_product_attention
    found = ring.attend([query, key, value], PARTS, layer_codecs, attention)
    ranks = [*[0] * 2, *[1] * 2, *[2] * 2, *[3] * 2, *[None] * 3, *[0] * 4, *[1] * 4, *[2] * 4, *[3] * 4]
    references = {name: layer_codecs.link_states[name, (0, 1)].sent.expected() for name in "kv"}
    assert references["k"].shape == (
        4,
        2,
        3,
        6,
        16,
    )  # of each rank two tokens of the first segment and four of the last
    for rank in range(4):
        seen = []
        for name, exact in (("k", key), ("v", value)):
            mine = exact.clone()
            for other in range(4):
                if places[other] != places[rank]:
                    mine[:, :, [token for token, owner in enumerate(ranks) if owner == other]] = references[name][other]
            seen.append(mine)
        own = [token for token, owner in enumerate(ranks) if owner == rank]
        assert torch.allclose(found[:, :, own], attention(query[:, :, own], *seen), atol=1e-6)
    sent = layer_codecs.stats
    assert sent.exact_bytes == 4 * 2 * 2 * 3 * 6 * 16 * 4 and sent.sent_bytes < 0.15 * sent.exact_bytes


def test_an_exact_ring_is_attention_and_infinite_values_stay() -> None:
    ring = VirtualRing(Topology.parse("2x2"), ("node",))
    query, key, value = map(tensor, range(3))
    expected = functional.scaled_dot_product_attention(query, key, value)
    found = ring.attend([query, key, value], PARTS, codecs_of(EXACT), functional.scaled_dot_product_attention)
    assert torch.equal(found, expected)
    value[0, 0, 0, 0] = torch.inf
    layer_codecs = codecs_of(CODEC)
    ring.attend([query, key, value], PARTS, layer_codecs, functional.scaled_dot_product_attention)
    assert layer_codecs.stats.repeated == 1
