"""Ranks that observe different hooks, links or bits: all make the same decision, none waits, results equal stock's."""

import contextlib
import dataclasses
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from benchmarks import bare_runtime
from tests import ranks
from tests.xdit.attention.test_overlap import depend_on_heads, start
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.session.session import Session
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig, Overlap

ODD_RANK = 1
"""Rank that differs from the others."""


def watch(transformer: torch.nn.Module) -> None:
    """Register a hook on each projection of V, as a profiler does."""
    for name, module in transformer.named_modules():
        if name.endswith("to_v"):
            module.register_forward_hook(lambda *_: None)


@torch.no_grad()
def decide(rank: int, what: str) -> tuple[bool, list[str]]:
    """Return whether all results equal stock's, and the decision on each layer signature, where one rank differs."""
    from xfuser.model_executor.layers import usp

    group, transformer, step = start(rank, depth=3)
    is_odd = rank == ODD_RANK
    mesh = Mesh.over(group, Topology.flat(2), [Plan.flat(Topology.flat(2))])
    policy, overlap = mesh.policy, Overlap(True)
    attention: contextlib.AbstractContextManager = contextlib.nullcontext()
    if what == "attention's bits":
        overlap = Overlap(True, 2)
        if is_odd:
            odd = depend_on_heads(usp._get_attention_function)
            attention = mock.patch.object(usp, "_get_attention_function", odd)
    if what == "links":
        overlap, policy = Overlap(), dataclasses.replace(policy, sends_early=lambda *_: not is_odd)
    with attention:
        expected = step()
        config = CocoDiffConfig(topology=mesh.topology, overlap=overlap)
        session = Session(config, dataclasses.replace(mesh, policy=policy))
        bare_runtime.use_session(session)
        if is_odd and what == "hooks from the start":
            watch(transformer)
        results = run(session, step)
        if is_odd and what == "hooks after a run":
            watch(transformer)
        results += run(session, step)
    signatures = list(session.layers.signatures)
    decided = sorted(
        f"{signature.status}; {signature.candidates and [str(each) for each in signature.candidates.schedules]}"
        for signature in signatures
    )
    return all(torch.equal(result, expected) for result in results), decided


def run(session: Session, step: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Run the steps of a declared run."""
    session.begin_run(4)
    results = []
    for _ in range(4):
        results.append(step())
        session.end_step()
    return results


@pytest.mark.parametrize("what", ["hooks from the start", "hooks after a run", "attention's bits", "links"])
def test_ranks_that_differ_make_the_same_decision(what: str) -> None:
    (first_is_stocks, first), (second_is_stocks, second) = ranks.run(decide, 2, what)
    assert first_is_stocks and second_is_stocks
    assert first == second
