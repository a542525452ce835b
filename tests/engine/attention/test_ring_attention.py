"""Ring attention along a topology on real ranks, against PyTorch's ring and attention on whole tensors."""

import gc
import math
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental import _attention as pytorch_ring
from torch.nn import functional

from tests import ranks
from xfuser_cocodiff.engine.attention.ring_attention import PartialOutput, Ring, ring_attention
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.layer_state import CodedCall
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.engine.compression.step_report import StepReport
from xfuser_cocodiff.engine.topology.topology import Topology

BATCH, HEADS, TOKENS, DIM = 2, 4, 12, 16
BLOCK_BYTES = 2 * BATCH * HEADS * TOKENS * DIM * 4
STEPS = 6


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_, **__) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)


def part(name: str, rank: int, step: int = 0) -> torch.Tensor:
    """Return the part of a tensor that a rank has at a step; every rank can compute it."""
    start, change = (
        torch.randn(BATCH, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(1000 * ord(name) + rank + seed))
        for seed in (0, 500 + 10 * step)
    )
    return start + 0.1 * change


def ring_over(topology: Topology, slow: tuple[str, ...] = ()) -> Ring:
    mesh = Mesh.over(dist.group.WORLD, topology, timeout=timedelta(seconds=60))
    return Ring(mesh, dist.get_rank(), AxisPartition.over(dist.group.WORLD, mesh, slow, Mesh.over))


def compare_to_pytorch(rank: int, sizes: str) -> dict[str, int]:
    topology = Topology.parse(sizes)
    pytorch_ring._cp_options.enable_load_balance = False
    ring = ring_over(topology)
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value = (part(name, rank).to(dtype) for name in "qkv")
        expected, *_ = pytorch_ring._templated_ring_attention(dist.group.WORLD, 2, attend, query, key, value)
        ring.mesh.traffic.reset()
        output = ring_attention(query, key, value, attend, ring)
        assert output.dtype == dtype
        assert torch.equal(output, expected)
        keys, values = (torch.cat([part(name, other).to(dtype) for other in range(topology.size)], 2) for name in "kv")
        exact = functional.scaled_dot_product_attention(query, keys, values)
        assert torch.allclose(output.float(), exact.float(), atol=1e-6 if dtype == torch.float32 else 2e-2)
        if dtype == torch.float32:
            sent = dict(ring.mesh.traffic.sent_bytes)
    return sent


@pytest.mark.parametrize("sizes", ["3x2", "2x2x2"])
def test_ring_is_bit_identical_to_pytorch_and_sends_each_block_along_an_axis_once(sizes: str) -> None:
    expected, reached = {}, 1
    for axis in Topology.parse(sizes).axes:  # blocks gathered along one axis are sent along the next one
        expected[axis.name] = BLOCK_BYTES * (axis.size - 1) * reached
        reached *= axis.size
    for sent in ranks.run(compare_to_pytorch, reached, sizes):
        assert sent == expected


SHARE = LayerSizes(4 * BLOCK_BYTES // 8, BLOCK_BYTES // 8, DIM, 4)


def run_coded(
    rank: int,
    sizes: str,
    slow: tuple[str, ...],
    schedule: str,
    broken: tuple[int, int] | None = None,
    mode: str = "balanced",
) -> tuple[list[float], list[StepReport], int, dict[str, int]]:
    """Return relative errors by step, the reports, the planned size of link references, and the bytes sent."""
    topology = Topology.parse(sizes)
    ring = ring_over(topology, slow)
    runtime = CodecRuntime(None, mode, schedule, list, ring_partition=ring.partition)
    runtime.begin_run(STEPS)
    errors = []
    for step in range(STEPS):
        assert runtime.layer_codecs(CodedCall("attn", 1, 0, SHARE)) is None  # no Ulysses group
        codecs = runtime.ring_codecs(CodedCall("attn", 1, 0, SHARE))
        query, key, value = (part(name, rank, step) for name in "qkv")
        if (step, rank) == broken:
            value[0, 0, 0, 0] = torch.inf
        ring.mesh.traffic.reset()
        output = ring_attention(query, key, value, attend, ring, "attn", layer_codecs=codecs)
        blocks = [[part(name, other, step) for other in range(topology.size)] for name in "kv"]
        exact = functional.scaled_dot_product_attention(query, *(torch.cat(each, 2) for each in blocks))
        errors.append(((output - exact).norm() / exact.norm()).item())
        planned = runtime.store.planned_bytes
        runtime.end_step()
    return errors, runtime.reports, planned, dict(ring.mesh.traffic.sent_bytes)


@pytest.mark.parametrize(("sizes", "slow"), [("2x2", ("node",)), ("2x2", ("node", "gpu"))])
def test_blocks_are_encoded_once_for_all_receivers(sizes: str, slow: tuple[str, ...]) -> None:
    topology = Topology.parse(sizes)
    num_slow = math.prod(axis.size for axis in topology.axes if axis.name in slow)
    by_bits = {bits: ranks.run(run_coded, topology.size, sizes, slow, f"bits={bits}") for bits in (8, 2)}
    for errors, reports, planned, sent in by_bits[8]:
        assert 0 < max(errors) < 0.02
        share = sum(report.sent_bytes for report in reports) / sum(report.exact_bytes for report in reports)
        assert share == pytest.approx((8 + 8 / DIM) / 32, rel=0.05)
        assert reports[-1].exact_bytes == (num_slow - 1) * BLOCK_BYTES
        assert reports[-1].reference_bytes <= planned < 1.1 * reports[-1].reference_bytes
        across = sum(size for name, size in sent.items() if set(name.split("+")) <= set(slow))
        assert across == pytest.approx(reports[-1].sent_bytes, rel=0.02)
    for (errors, *_), (coarse, *_) in zip(by_bits[8], by_bits[2], strict=True):
        assert max(errors) < max(coarse) < 0.3


def test_non_finite_values_are_sent_losslessly_once() -> None:
    for rank, (errors, reports, *_) in enumerate(ranks.run(run_coded, 4, "2x2", ("node",), "bits=8", (2, 1))):
        is_affected = rank in (1, 3)  # the rank of the value, and its peer on the other node
        assert [report.repeated for report in reports] == [0, 0, int(is_affected), 0, 0, 0]
        assert not math.isfinite(errors[2]) and max(errors[:2] + errors[3:]) < 0.02


def test_tokens_are_selected_by_their_owner() -> None:
    schedule = "warmup=1,refresh=0,cached=0.5"
    for errors, reports, *_ in ranks.run(run_coded, 4, "2x2", ("node",), schedule, None, "paper"):
        assert reports[-1].sent_bytes < 0.55 * reports[-1].exact_bytes
        assert 0 < reports[-1].error < 0.5 and max(errors) < 0.3


def fail_in_flight(rank: int) -> list[str]:
    """Raise an error while blocks are in flight, compare the next result, and return warnings about handles."""
    ring = ring_over(Topology.parse("2x2"))
    tensors = [part(name, rank) for name in "qkv"]
    expected = ring_attention(*tensors, attend, ring)

    def fail(*_: object) -> PartialOutput:
        raise ArithmeticError("in attention")

    with warnings.catch_warnings(record=True) as dropped:
        warnings.simplefilter("always", ResourceWarning)
        with pytest.raises(ArithmeticError):
            ring_attention(*tensors, fail, ring)
        gc.collect()
    assert torch.equal(ring_attention(*tensors, attend, ring), expected)
    return [str(each.message) for each in dropped]


def test_no_block_is_dropped_after_an_error() -> None:
    assert ranks.run(fail_in_flight, 4) == [[]] * 4
