"""Replaced all-to-all functions of xDiT against their originals, on the same ranks and tensors."""

import os
from types import SimpleNamespace

import pytest
import torch

from tests import ranks
from tests.quick import slow_but
from xfuser_cocodiff.xdit.session.session import Session, active

DTYPES = (torch.float32, torch.bfloat16)
TOPOLOGIES = {4: ["2x2", "4"], 8: ["2x2x2", "2x4"]}


def start(rank: int, ring: int = 1) -> None:
    """Initialize xDiT with all ranks in one sequence-parallel group."""
    from xfuser.core.distributed import init_distributed_environment, initialize_model_parallel

    world = int(os.environ["WORLD_SIZE"])
    init_distributed_environment(rank=rank, world_size=world)
    initialize_model_parallel(sequence_parallel_degree=world, ulysses_degree=world // ring, ring_degree=ring)


def use(topology: str, ring: int = 1, **more: str) -> None:
    """Initialize xDiT's runtime state with the plugin enabled."""
    from xfuser import xFuserArgs
    from xfuser.core.distributed import initialize_runtime_state
    from xfuser.core.distributed.runtime_state import RuntimeState

    # xDiT rejects ring attention with the backends of CPUs; its all-to-all works there nevertheless.
    RuntimeState._check_if_backend_compatible_with_current_configuration = lambda *_: None
    world = int(os.environ["WORLD_SIZE"]) // ring
    options = {
        "use_cocodiff": True,
        "cocodiff_topology": topology,
        "cocodiff_a2a": "hierarchical",
        "cocodiff_mode": "exact",
        **more,
    }
    config = xFuserArgs(model="tiny", ulysses_degree=world, ring_degree=ring, **options).create_config()[0]
    transformer = SimpleNamespace(config=SimpleNamespace(num_attention_heads=world))
    initialize_runtime_state(SimpleNamespace(transformer=transformer), config)


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + int(os.environ["RANK"]))
    return torch.randn(*shape, generator=generator).to(dtype)


def equal(got: object, expected: object) -> bool:
    if isinstance(expected, torch.Tensor):
        return torch.equal(got, expected) and got.is_contiguous() == expected.is_contiguous()
    return len(got) == len(expected) and all(map(equal, got, expected))


def check_usp(rank: int, topologies: list[str], ring: int = 1) -> None:
    from xfuser.model_executor.layers import usp

    start(rank, ring)
    world = int(os.environ["WORLD_SIZE"]) // ring
    for topology in topologies:
        use(topology, ring)
        for batch, heads, tokens, depth in ((1, world, 5, 4), (2, 3 * world, 7, 1)):
            for dtype in DTYPES:
                q, k, v, gate = (random(i, batch, heads, tokens, depth, dtype=dtype) for i in range(4))
                few = [random(i, batch, world, tokens, depth, dtype=dtype) for i in (5, 6)]
                attended = random(7, batch, heads, world * tokens, depth, dtype=dtype)
                strided = attended.transpose(1, 2).contiguous().transpose(1, 2)
                for function, tensors in (
                    (usp._ft_c_input_all_to_all, (q,)),
                    (usp._ft_c_input_all_to_all, (q.transpose(2, 3).contiguous().transpose(2, 3),)),
                    (usp._combined_qkv_all_to_all, (q, k, v)),
                    (usp._combined_qkv_all_to_all, (q, k, v, gate)),
                    (usp._combined_gqa_qkv_all_to_all, (q, *few)),
                    (usp._combined_gqa_qkv_all_to_all, (q, *few, gate)),
                    (usp._ft_c_output_all_to_all, (attended,)),
                    (usp._ft_c_output_all_to_all, (strided,)),
                ):
                    active().traffic.reset()
                    assert equal(function(*tensors), function.__wrapped__(*tensors)), function.__name__
                    assert active().traffic.calls, f"{function.__name__} fell through to stock"


@pytest.mark.parametrize("degree", slow_but([4], TOPOLOGIES))
def test_all_to_all_equals_stock(degree: int) -> None:
    ranks.run(check_usp, degree, TOPOLOGIES[degree])


def test_all_to_all_in_a_ring_equals_stock() -> None:
    ranks.run(check_usp, 4, ["2x1"], 2)


def test_codecs_are_inactive_in_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph would repeat the codecs of one step."""
    session = Session(runtime=SimpleNamespace(layer_codecs=lambda *_: "coded", disable=lambda _: None))
    layer = SimpleNamespace(name="a", is_repeated=False, branch=0, root=SimpleNamespace(run="a run"), call=None)
    assert session.codecs.of_layer(layer, "share") == "coded"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert session.codecs.of_layer(layer, "share") is None
