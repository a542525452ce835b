"""Full-size transformers have the parameters, attention shapes and FLOPs of the real models.

One process stands for all ranks of a group: tensors are fake, and so are the collectives (PyTorch's "fake" backend).
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from tests import ranks
from xfuser_cocodiff.lab.full_size.architectures import ARCHITECTURES
from xfuser_cocodiff.lab.full_size.transformer import FullSizeTransformer, build
from xfuser_cocodiff.lab.simulation.sharding import TokenShard, shard
from xfuser_cocodiff.lab.simulation.workloads import WORKLOADS
from xfuser_cocodiff.xdit.launching import bare_runtime

PARAMETERS = {"flux.1-dev": 11.9e9}
"""Parameters of the real transformers, as published with their weights."""
MODULATION = {"flux.1-dev": {"double": 2 * 6, "single": 3}}
"""Vectors that the modulation of a block computes, each a projection of one token."""
MLP_PROJECTIONS = 2 * 4
"""Cost of a token's MLP in projections."""
PROJECTIONS = 4
"""Projections of a token to Q, K and V, and from O."""
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3])
}
"""FLOPs of the CPU's attention, which PyTorch's counter lacks."""


@contextmanager
def group(degree: int, rank: int = 0) -> Iterator[None]:
    """Return a context of fake tensors on one rank of a group whose collectives only have shapes."""
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(degree), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=degree)
    new_group = dist.new_group
    with mock.patch.object(dist, "new_group", lambda ranks, *_, **__: new_group(ranks, backend="fake")):
        bare_runtime.start()
    with FakeTensorMode():
        yield


@contextmanager
def attention_calls() -> Iterator[list[dict[str, Any]]]:
    """Collect the arguments of xDiT's `USP`."""
    from xfuser.model_executor.layers import usp

    calls, original = [], usp.USP

    def watched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append({"query": query, "key": key, "value": value, **options})
        return original(query, key, value, **options)

    users = [module for name, module in sys.modules.items() if name.startswith("xfuser.model_executor")]
    users = [module for module in users if getattr(module, "USP", None) is original]
    for module in users:
        module.USP = watched
    yield calls
    for module in users:
        module.USP = original


def num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def parameters(rank: int, name: str) -> float:
    """Return the number of parameters of the real model, by extrapolation from one block of each kind."""
    with group(1):
        full = build(name, 1, torch.device("cpu"))
    missing = {kind: full.counts[kind] - len(blocks) for kind, blocks in full.blocks.items()}
    assert set(full.counts) == set(ARCHITECTURES[name].kinds)
    return num_parameters(full.model) + sum(missing[kind] * num_parameters(full.blocks[kind][0]) for kind in missing)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_real_model(name: str) -> None:
    [total] = ranks.run(parameters, 1, name)
    assert total == pytest.approx(PARAMETERS[name], rel=0.02)
    workload = WORKLOADS[name]
    assert sum(kind.count for kind in ARCHITECTURES[name].kinds.values()) == workload.layers


def shapes(rank: int, name: str, resolution: int, degree: int, batch: int) -> tuple[list, tuple[int, ...]]:
    """Return the shapes of Q, K and V in each call of attention, and that of the output."""
    with group(degree, rank=degree - 1), attention_calls() as calls:
        full = build(name, 2, torch.device("cpu"))
        output = full.call(resolution, batch)
    return [[tuple(call[tensor].shape) for tensor in ("query", "key", "value")] for call in calls], tuple(output.shape)


@pytest.mark.parametrize(
    ("name", "resolution", "degree", "batch"), [("flux.1-dev", 1024, 2, 1), ("flux.1-dev", 768, 12, 3)]
)
def test_attention_has_the_shapes_of_the_shard(name: str, resolution: int, degree: int, batch: int) -> None:
    [(calls, output)] = ranks.run(shapes, 1, name, resolution, degree, batch)
    workload, tokens = WORKLOADS[name], shard(WORKLOADS[name], resolution, degree)
    rows = batch * workload.rows_per_image
    expected = [(rows, workload.heads, tokens.num_tokens(tensor), workload.head_dim) for tensor in "qkv"]
    assert calls == 2 * len(ARCHITECTURES[name].kinds) * [expected]
    assert output[0] == rows


def flops(rank: int, name: str, resolution: int, degree: int) -> dict[str, int]:
    """Return the FLOPs of the first block of each kind."""
    with group(degree):
        full = build(name, 1, torch.device("cpu"))
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            full.call(resolution, 1)
    counts = {module: sum(each.values()) for module, each in counter.get_flop_counts().items()}
    return {kind: counts[_path(full, blocks[0])] for kind, blocks in full.blocks.items()}


def _path(full: FullSizeTransformer, block: torch.nn.Module) -> str:
    """Return the name of a block in the FLOP counter."""
    [name] = [name for name, module in full.model.named_modules() if module is block]
    return f"{type(full.model).__name__}.{name}"


@pytest.mark.parametrize(("name", "resolution", "degree"), [("flux.1-dev", 1024, 8)])
def test_flops_are_those_of_the_workload(name: str, resolution: int, degree: int) -> None:
    [counted] = ranks.run(flops, 1, name, resolution, degree)
    workload, tokens = WORKLOADS[name], shard(WORKLOADS[name], resolution, degree)
    assert {kind: expected_flops(name, kind, tokens, degree) for kind in counted} == counted
    assert tokens.attended == workload.tokens(resolution)


def expected_flops(name: str, kind: str, tokens: TokenShard, degree: int) -> float:
    workload = WORKLOADS[name]
    projections = (PROJECTIONS + workload.mlp_projections) * workload.projection_flops(tokens.queries)
    attention = workload.attention_flops(tokens.queries * degree, tokens.attended, workload.heads / degree)
    return projections + attention + workload.projection_flops(MODULATION[name][kind])
