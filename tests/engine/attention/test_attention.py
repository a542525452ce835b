"""Ulysses attention with overlapping all-to-alls on real ranks, against attention on whole tensors."""

import dataclasses
import gc
import random
import sys
import time
import warnings
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from tests import ranks
from xfuser_cocodiff.engine.attention.reshard import start_seq_to_heads
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.comm.comm_stream import CommStream
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.stages import Stages
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.topology.devices import CPU
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology

PLANS = ("flat", "hierarchical", "hierarchical:node,gpu")


def mesh_of(text: str, device: torch.device = CPU) -> Mesh:
    topology = Topology.parse("2x2", 4)
    plans = [Plan.parse(text, topology)]
    return Mesh.over(dist.group.WORLD, topology, plans, timeout=timedelta(seconds=60), device=device)


def whole(seed: int, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor (B, H, S, D), the same on every rank."""
    return torch.randn(2, heads, 20, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


def share(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the sequence, in the memory layout of attention processors (B, S, H, D)."""
    return tensor.chunk(4, 2)[dist.get_rank()].transpose(1, 2).contiguous().transpose(1, 2)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_group: HeadGroup) -> torch.Tensor:
    repeats = query.shape[1] // key.shape[1]
    return functional.scaled_dot_product_attention(
        query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    )


def check_attention(rank: int, text: str) -> None:
    mesh = mesh_of(text)
    for dtype in (torch.float32, torch.bfloat16):
        for key_heads in (16, 8):
            q, k, v = whole(1, 16, dtype), whole(2, key_heads, dtype), whole(3, key_heads, dtype)
            expected = share(attend(q, k, v, HeadGroup()))
            for groups in (1, 2) if key_heads == 8 else (1, 2, 4):
                for early in (False, True):
                    ulysses = UlyssesAttention(mesh, groups)
                    if early:
                        ulysses.start_value(share(v))
                    output = ulysses.run(share(q), share(k), share(v), attend)
                    assert torch.equal(output, expected), (dtype, key_heads, groups, early)


@pytest.mark.parametrize("plan", PLANS)
def test_attention_equals_attention_on_whole_tensors(plan: str) -> None:
    ranks.run(check_attention, 4, plan)


def stress(rank: int, text: str, device: torch.device, staged: bool) -> None:
    """Delay ranks at random, on the host and on the device, and compare results."""
    mesh, generator = mesh_of(text, device), random.Random(rank)
    if staged:
        stages = dataclasses.replace(mesh.stages, staged=staged)
        mesh = dataclasses.replace(mesh, stages=stages, comm_stream=CommStream.on(device, staged))

    def delay() -> None:
        if generator.random() < 0.3:
            time.sleep(generator.random() * 0.004)
        if device.type == "cuda" and generator.random() < 0.3:
            torch.cuda._sleep(generator.randrange(5_000_000))

    def late_start(self: Stages, *arguments: object) -> object:
        delay()
        return start(self, *arguments)

    def late_attend(*arguments: object) -> torch.Tensor:
        delay()
        return attend(*arguments)

    start, tensors = Stages.start, [whole(seed, 16, torch.float32).to(device) for seed in range(6)]
    with mock.patch.object(Stages, "start", late_start):
        for step in range(80):
            q, k, v = (tensors[(step + shift) % 6] for shift in range(3))
            groups = (1, 2, 4)[step % 3]
            ulysses = UlyssesAttention(mesh, groups)
            ulysses.start_value(share(v))
            delay()
            output = ulysses.run(share(q), share(k), share(v), late_attend)
            assert torch.equal(output, share(attend(q, k, v, HeadGroup()))), step


def test_random_delays_do_not_change_results() -> None:
    ranks.run(stress, 4, "hierarchical", CPU, False)


@pytest.mark.gpu
def test_random_delays_do_not_change_results_on_a_shared_device() -> None:
    ranks.run(stress, 4, "hierarchical", torch.device("cuda", 0), True, spawn=True)


def fail_in_flight(rank: int, groups: int, early: bool) -> None:
    """Raise an error while all-to-alls are in flight, and compare the results of later calls."""
    mesh = mesh_of("hierarchical")
    q, k, v = (whole(seed, 16, torch.float32) for seed in range(3))

    def fail(*given: Any) -> torch.Tensor:
        if given[-1].index == groups - 1:  # then O of the head groups before it is in flight too
            raise ArithmeticError("in attention")
        return attend(*given)

    warnings.simplefilter("error", ResourceWarning)
    dropped: list[object] = []
    sys.unraisablehook = dropped.append
    for attention in (fail, attend, fail, attend):
        sent = start_seq_to_heads([share(v)], mesh, Label("v", head_group=HeadGroup(0, groups))) if early else None
        try:
            output = UlyssesAttention(mesh, groups, early_value=sent).run(share(q), share(k), share(v), attention)
        except ArithmeticError:
            assert attention is fail
        else:
            assert torch.equal(output, share(attend(q, k, v, HeadGroup())))
    gc.collect()
    assert not dropped  # handles that nobody waited for


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_attention_works_after_an_error(groups: int, early: bool) -> None:
    ranks.run(fail_in_flight, 4, groups, early)
