"""Guidance branches coded together in a ring of K and V, against their definition, and both ends of each link."""

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.engine.compression.test_joint_branches import (
    OF_RANKS,
    SCHEDULE,
    STEPS,
    Expected,
    assert_equal_ends,
    calls_of,
    contents,
    ends,
    over,
)
from xfuser_cocodiff.engine.attention.ring_attention import PartialOutput, Ring, ring_attention
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.layer_state import CodedCall
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.engine.topology.topology import Topology


def gather(mine: list[torch.Tensor], mesh: Mesh, layer_codecs: LayerCodecs) -> dict[int, tuple[torch.Tensor, ...]]:
    """Return K and V of all other ranks."""
    blocks: dict[int, tuple[torch.Tensor, ...]] = {}

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: int, rank: int) -> PartialOutput:
        if step:
            blocks[rank] = key, value
        return query, query[..., 0]

    ring_attention(mine[0], *mine, attend, Ring(mesh, dist.get_rank()), layer_codecs=layer_codecs)
    return blocks


def run_calls(rank: int, sizes: str, how: str, schedule: str) -> list[tuple]:
    """Gather K and V of branches in calls of their own and compare what arrives; return the references of both ends."""
    kernels.use("torch")
    size = dist.get_world_size()
    mesh, partition = over(sizes)
    runtime = CodecRuntime(None, "balanced", schedule, list, ring_partition=partition)
    expected = Expected(bool(runtime.schedule.predictor))
    runtime.begin_run(STEPS)
    for step in range(STEPS):
        for branch, content in enumerate(calls_of(step, how)):
            bad = step == 3 and how == f"not finite in {branch}"
            wholes = contents(branch, content, step, how, size)
            leading = contents(0, calls_of(step, how)[0], step, how, size)
            if bad:
                for tensor in wholes.values():
                    tensor[:, :, :, 0] = torch.nan
            query, *mine = (wholes[name].chunk(size, 2)[rank].contiguous() for name in "qkv")
            layer_codecs = runtime.ring_codecs(CodedCall("attn", 1, branch, LayerSizes.of(query, *mine)))
            for source, block in gather(mine, mesh, layer_codecs).items():
                for name, arrived in zip("kv", block, strict=True):
                    values, of_leader = (each[name].chunk(size, 2)[source] for each in (wholes, leading))
                    wanted = values
                    if source // (size // 2) != rank // (size // 2):
                        lost = "follower" if how == "skipped" and step == 5 else ""
                        wanted = expected.received(name, source, rank, branch, values, of_leader, bad, lost)
                    what = f"{name} of branch {branch} in step {step}: "
                    torch.testing.assert_close(arrived, wanted, rtol=0, atol=1e-5, equal_nan=True, msg=what.__add__)
        assert step != 2 or runtime.store.planned_bytes == runtime.store.nbytes  # all previous ones are there
        if step < STEPS - 1:
            runtime.end_step()
    return ends(runtime)


@pytest.mark.parametrize(
    ("sizes", "how", "schedule"),
    [
        ("2x2", "plain", OF_RANKS),
        *(
            ("node=2", how, SCHEDULE)
            for how in ("skipped", "swapped", "not finite in 0", "not finite in 1", "three branches")
        ),
    ],
)
def test_rings_decode_what_the_definition_says(sizes: str, how: str, schedule: str) -> None:
    assert_equal_ends(ranks.run(run_calls, Topology.parse(sizes).size, sizes, how, schedule))
