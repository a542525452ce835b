"""A rank that dies or stops: every other rank says which one it was, and none of them hangs."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from xfuser_cocodiff import probe, roll_call
from xfuser_cocodiff.bench import survey
from xfuser_cocodiff.collectives import Mesh
from xfuser_cocodiff.exchange import reshard
from xfuser_cocodiff.plan import Plan
from xfuser_cocodiff.roll_call import LostRankError
from xfuser_cocodiff.topology import Topology

CULPRIT = 2
STOPPED_SECONDS = 12
ABSENT = 0
"""Instead of a signal that ends the rank: it is somewhere else."""


def exchange_until_lost(rank: int, text: str, end: int) -> str:
    """Exchange again and again; one rank meets its end on the way."""
    roll_call.PATIENCE_SECONDS = 5.0
    topology = Topology.parse("2x2", 4)
    plan = Plan.parse(text, topology)
    mesh = Mesh.over(dist.group.WORLD, topology, [plan], timeout=timedelta(seconds=4))
    return _said(rank, end, lambda: reshard([torch.randn(1, 4, 512, 8)], 1, 2, mesh))


def probe_until_lost(rank: int, end: int) -> str:
    roll_call.PATIENCE_SECONDS = 5.0
    topology = Topology.parse("2x2", 4)
    mesh = Mesh.over(dist.group.WORLD, topology, timeout=timedelta(seconds=4))
    return _said(rank, end, lambda: probe.measure(mesh, dist.group.WORLD, torch.device("cpu")))


def survey_until_lost(rank: int, end: int) -> str:
    roll_call.PATIENCE_SECONDS = 5.0
    return _said(rank, end, lambda: survey.measure(dist.group.WORLD, None, torch.device("cpu"), timeout=20))


def _said(rank: int, end: int, work: Callable[[], object]) -> str:
    for number in range(1000):
        if number == 2 and rank == CULPRIT:
            if end == ABSENT:
                time.sleep(STOPPED_SECONDS)
            # A stopped process must not keep the test waiting once the others have given it up.
            subprocess.Popen(["sh", "-c", f"sleep {STOPPED_SECONDS}; kill -KILL {os.getpid()}"])
            os.kill(os.getpid(), end)
        work()
    return "no error"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stops"])
@pytest.mark.parametrize("plan", ["flat", "flat*", "hierarchical", "hierarchical:node,gpu/2"])
def test_every_rank_names_the_one_that_was_lost_in_an_exchange(plan: str, end: int) -> None:
    results = ranks.outcomes(exchange_until_lost, 4, plan, end)
    for rank, result in enumerate(results):
        if rank != CULPRIT:
            assert isinstance(result, LostRankError), result
            assert f"rank {CULPRIT} is gone or not answering" in str(result)


def test_every_rank_names_the_one_that_did_not_come_to_an_exchange() -> None:
    results = ranks.outcomes(exchange_until_lost, 4, "hierarchical", ABSENT)
    said = [str(result) for rank, result in enumerate(results) if rank != CULPRIT]
    assert all(isinstance(result, LostRankError) for rank, result in enumerate(results) if rank != CULPRIT), results
    # Who waits for it in the same stage can tell; the others know that nobody is gone.
    assert any(f"rank {CULPRIT} is alive but did not come to it" in text for text in said), said
    assert not any("gone" in text for text in said), said


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stops"])
@pytest.mark.parametrize("case", [probe_until_lost, survey_until_lost])
def test_every_rank_names_the_one_that_was_lost_in_a_probe(case: Callable, end: int) -> None:
    results = ranks.outcomes(case, 4, end)
    for rank, result in enumerate(results):
        if rank != CULPRIT:
            assert isinstance(result, LostRankError), result
            assert f"rank {CULPRIT} is gone or not answering" in str(result)
