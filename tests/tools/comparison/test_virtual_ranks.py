"""Virtual ranks that gather K and V: a ring against its definition, and a Ulysses group against real ranks, bit for
bit."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from tests import ranks
from tests.coded_layers import encode, layer_codecs
from tests.quick import slow_but
from xfuser_cocodiff.engine.attention.reshard import pad_heads
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.codec.codec import EXACT, Codec
from xfuser_cocodiff.engine.codec.coded_tensor import CodedTensor, decode
from xfuser_cocodiff.engine.codec.link_reference import LinkReference
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.layer_state import CodedCall
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.comparison.virtual_ranks import VirtualRanks, VirtualRing

PARTS = (8, 3, 16)
"""Tokens of three segments; the second is not divisible by four ranks."""
CODEC = Codec(2, is_keyframe=True)


def tensor(seed: int) -> torch.Tensor:
    return torch.randn(2, 3, sum(PARTS), 16, generator=torch.Generator().manual_seed(seed))


def decoded(values: torch.Tensor) -> torch.Tensor:
    """Return values (L, G, H, T, D) as receivers decode them."""
    payload, target = (
        values.new_empty(4, CODEC.payload_bytes(values.shape, values.dtype), dtype=torch.uint8),
        values + 0,
    )
    encode(CodedTensor(values, LinkReference(), CODEC, None, payload))
    decode([CodedTensor(target, LinkReference(), CODEC, None, payload)])
    return target


def codecs_of(codec: Codec) -> LayerCodecs:
    return layer_codecs(None, {"q": EXACT, "k": codec, "v": codec, "o": EXACT}, {})


@pytest.mark.parametrize(
    ("slow", "slow_indices", "receivers"), [(("node",), [0, 0, 1, 1], 1), (("node", "gpu"), [0, 1, 2, 3], 3)]
)
def test_virtual_ring_equals_its_definition(slow: tuple[str, ...], slow_indices: list[int], receivers: int) -> None:
    ring, codecs = VirtualRing(Topology.parse("2x2"), slow), codecs_of(CODEC)
    query, key, value = map(tensor, range(3))
    attention = functional.scaled_dot_product_attention
    found = ring.attend([query, key, value], PARTS, codecs, attention)
    ranks = [*[0] * 2, *[1] * 2, *[2] * 2, *[3] * 2, *[None] * 3, *[0] * 4, *[1] * 4, *[2] * 4, *[3] * 4]
    # Each rank has two tokens of the first segment and four of the last.
    owned = [[token for token, owner in enumerate(ranks) if owner == rank] for rank in range(4)]
    sent = [decoded(torch.stack([exact[:, :, own] for own in owned])) for exact in (key, value)]
    for rank, own in enumerate(owned):
        received = []
        for exact, blocks in zip((key, value), sent, strict=True):
            mine = exact.clone()
            for other in range(4):
                if slow_indices[other] != slow_indices[rank]:
                    mine[:, :, owned[other]] = blocks[other]
            received.append(mine)
        assert torch.allclose(found[:, :, own], attention(query[:, :, own], *received), atol=1e-6)
    stats = codecs.stats
    assert stats.exact_bytes == receivers * 4 * 2 * 2 * 3 * 6 * 16 * 4 and stats.sent_bytes < 0.15 * stats.exact_bytes


STEPS, BRANCHES = 5, 2
SEGMENTS = 8, 16


def content(name: str, branch: int, step: int, heads: int) -> torch.Tensor:
    """Return a tensor (B, H, S, D) that changes a little at each step, the same on every rank."""
    seeds = ord(name), 1000 * ord(name) + step, 50 + ord(name) + branch
    first, change, own = (
        torch.randn(2, heads, sum(SEGMENTS), 16, generator=torch.Generator().manual_seed(seed)) for seed in seeds
    )
    return first + 0.1 * change + 0.3 * branch * own


def by_rank(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return tokens in the order of real ranks: by rank, then by segment."""
    parts = [part.chunk(size, 2) for part in tensor.split(SEGMENTS, 2)]
    return torch.cat([part[rank] for rank in range(size) for part in parts], 2)


def gather_really_and_virtually(rank: int, sizes: str, heads: int, mode: str, schedule: str) -> tuple[int, int]:
    """Compare K and V as they arrive at this rank with those of virtual ranks; return the bytes sent in both."""
    kernels.use("torch")
    topology, size = Topology.parse(sizes), dist.get_world_size()
    mesh = Mesh.over(dist.group.WORLD, topology)
    partition = AxisPartition.over(dist.group.WORLD, mesh, ("node",), Mesh.over)
    virtual, fast = VirtualRanks(topology, ("node",), may_gather=True), partition.num_fast
    real = CodecRuntime(partition, mode, schedule, list)
    simulated = CodecRuntime(virtual.layout, mode, schedule, list)
    seen: list[list[torch.Tensor]] = []

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        seen.append([key, value])
        return query

    for runtime in (real, simulated):
        runtime.begin_run(STEPS)
    for step in range(STEPS):
        for branch in range(BRANCHES):
            tensors = [content(name, branch, step, heads) for name in "qkv"]
            mine = [pad_heads(by_rank(each, size).chunk(size, 2)[rank], fast).contiguous() for each in tensors]
            codecs = real.layer_codecs(CodedCall("attn", 1, branch, LayerSizes.of(*mine), gathers_kv=True))
            ulysses = UlyssesAttention(mesh, layer_codecs=codecs, gather=partition)
            ulysses.start_inputs(*mine)
            _, *arrived = ulysses.wait_inputs(0)
            shares = LayerSizes.of(*tensors, fraction=virtual.shard_fraction(tensors[1].shape, SEGMENTS, True))
            of_mine = LayerSizes.of(*mine)
            assert shares == of_mine._replace(row_values=shares.row_values)  # few tokens share a row in few ways
            seen.clear()
            codecs = simulated.layer_codecs(CodedCall("attn", 1, branch, shares, gathers_kv=True))
            virtual.attend(tensors, SEGMENTS, codecs, attention)
            for found, expected in zip(arrived, seen[partition.slow_index], strict=True):
                of_rank = pad_heads(by_rank(expected, size), fast).chunk(fast, 1)[partition.fast_index]
                assert torch.equal(found, of_rank), (step, branch)
        for runtime in (real, simulated):
            runtime.end_step()
    for runtime in (real, simulated):
        assert all(report.repeated == 0 < report.error for report in runtime.reports[1:])
    sent = (sum(report.sent_bytes for report in runtime.reports) for runtime in (real, simulated))
    return next(sent), next(sent)


SCHEDULES = [
    ("balanced", "bits=2"),
    ("paper", "warmup=1,refresh=0,cached=0.5"),
    ("balanced", "bits=1.6,predictor=0,joint=0"),
    ("balanced", "first=exact,bits=5.3"),
]
SIZES = [("2x2", 4), ("2x2", 3), ("node=2", 3)]
"""Topologies and numbers of heads, which two fast ranks divide or not."""
QUICK = [("2x2", 3, *SCHEDULES[0]), ("2x2", 4, *SCHEDULES[1])]


@pytest.mark.parametrize(
    ("sizes", "heads", "mode", "schedule"),
    slow_but(QUICK, [(*each, *schedule) for each in SIZES for schedule in SCHEDULES]),
)
def test_virtual_ranks_gather_the_values_of_real_ones(sizes: str, heads: int, mode: str, schedule: str) -> None:
    found = ranks.run(gather_really_and_virtually, Topology.parse(sizes).size, sizes, heads, mode, schedule)
    really, virtually = zip(*found, strict=True)
    assert set(virtually) == {sum(really)}
