"""Attention with K and V gathered along slow axes on real ranks, against attention on whole tensors."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from tests import ranks
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.layer_state import CodedCall
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.engine.compression.step_report import StepReport
from xfuser_cocodiff.engine.topology.topology import Topology

HEADS, TOKENS, DIM, STEPS = 8, 24, 16, 5


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: HeadGroup) -> torch.Tensor:
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    return functional.scaled_dot_product_attention(query, key, value)


def whole(name: str, heads: int, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor (B, H, S, D) at a step, the same on every rank."""
    start, change = (
        torch.randn(2, heads, TOKENS, DIM, generator=torch.Generator().manual_seed(1000 * ord(name) + seed))
        for seed in (0, 500 + step)
    )
    return (start + 0.1 * change).to(dtype)


def share(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the sequence, in the memory layout of attention processors (B, S, H, D)."""
    return tensor.chunk(dist.get_world_size(), 2)[dist.get_rank()].transpose(1, 2).contiguous().transpose(1, 2)


def over(sizes: str) -> tuple[Mesh, AxisPartition]:
    topology = Topology.parse(sizes)
    mesh = Mesh.over(dist.group.WORLD, topology, timeout=timedelta(seconds=60))
    return mesh, AxisPartition.over(dist.group.WORLD, mesh, ("node",), Mesh.over)


def start_v(
    value: torch.Tensor,
    mesh: Mesh,
    gather: AxisPartition | None,
    groups: int,
    layer_codecs: LayerCodecs | None = None,
) -> Handle:
    """Start V before Q and K."""
    return UlyssesAttention(mesh, groups, layer_codecs=layer_codecs, gather=gather).start_value(value)


def compare_lossless(rank: int, sizes: str) -> dict[str, int]:
    """Compare with whole tensors, and return the bytes of one call by axis."""
    mesh, partition = over(sizes)
    for dtype in (torch.float32, torch.bfloat16):
        for kv_heads in (HEADS, HEADS // 2):
            q, k, v = (whole(name, heads, 0, dtype) for name, heads in (("q", HEADS), ("k", kv_heads), ("v", kv_heads)))
            expected = share(attend(q, k, v))
            for groups in (1, 2) if partition.num_fast * 2 <= kv_heads else (1,):
                for is_early in (False, True):
                    mesh.traffic.reset()
                    early = start_v(share(v), mesh, partition, groups) if is_early else None
                    ulysses = UlyssesAttention(mesh, groups, early_value=early, gather=partition)
                    output = ulysses.run(share(q), share(k), share(v), attend)
                    assert torch.equal(output, expected), (dtype, kv_heads, groups, is_early)
    return dict(mesh.traffic.sent_bytes)


CASES = [("2x2", 2), ("node=3", 3)]
"""Topologies and their numbers of nodes."""


@pytest.mark.parametrize(("sizes", "num_nodes"), CASES)
def test_attention_equals_attention_on_whole_tensors(sizes: str, num_nodes: int) -> None:
    size = Topology.parse(sizes).size
    for sent in ranks.run(compare_lossless, size, sizes):
        kv_bytes = 2 * 2 * HEADS // 2 * TOKENS // size * DIM * 2  # K and V with half of the heads in bf16
        assert sent["node"] == (num_nodes - 1) * kv_bytes  # neither Q nor O crosses it


def run_coded(
    rank: int, sizes: str, schedule: str, mode: str = "balanced"
) -> tuple[list[float], list[StepReport], int, int]:
    """Return relative errors by step, the reports, the planned size of references, and the bytes between nodes."""
    mesh, partition = over(sizes)
    runtime = CodecRuntime(partition, mode, schedule, list)
    runtime.begin_run(STEPS)
    errors = []
    for step in range(STEPS):
        tensors = [whole(name, HEADS, step) for name in "qkv"]
        exact = share(attend(*tensors))
        q, k, v = map(share, tensors)
        codecs = runtime.layer_codecs(CodedCall("attn", 1, 0, LayerSizes.of(q, k, v), gathers_kv=True))
        gather = partition if codecs else None
        mesh.traffic.reset()
        early = start_v(v, mesh, gather, 1, codecs)
        ulysses = UlyssesAttention(mesh, early_value=early, layer_codecs=codecs, gather=gather)
        output = ulysses.run(q, k, v, attend)
        errors.append(((output - exact).norm() / exact.norm()).item())
        planned = runtime.store.planned_bytes
        runtime.end_step()
    return errors, runtime.reports, planned, mesh.traffic.sent_bytes["node"]


@pytest.mark.parametrize(("sizes", "num_nodes"), CASES)
def test_errors_fall_with_bits_and_bytes_are_those_of_the_codes(sizes: str, num_nodes: int) -> None:
    size = Topology.parse(sizes).size
    by_bits = {bits: ranks.run(run_coded, size, sizes, f"bits={bits}") for bits in (8, 2)}
    block_bytes = 2 * 2 * HEADS * TOKENS // size * DIM * 4
    for errors, reports, planned, sent in by_bits[8]:
        assert 0 < max(errors) < 0.02
        assert reports[-1].exact_bytes == (num_nodes - 1) * block_bytes
        assert reports[-1].reference_bytes <= planned < 1.1 * reports[-1].reference_bytes
        assert sent == pytest.approx(reports[-1].sent_bytes, rel=0.03)
    for (errors, *_), (coarse, *_) in zip(by_bits[8], by_bits[2], strict=True):
        assert max(errors) < max(coarse) < 0.3


def test_k_sends_the_tokens_that_v_selected() -> None:
    how = "warmup=1,refresh=0,cached=0.5", "paper"
    for errors, reports, planned, _ in ranks.run(run_coded, 4, "2x2", *how):
        assert 0.5 < reports[-1].sent_bytes / reports[-1].exact_bytes < 0.55
        assert reports[-1].reference_bytes <= planned
        assert 0 < reports[-1].error < 0.5 and max(errors) < 0.3
