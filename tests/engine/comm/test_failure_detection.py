"""Failure detection: when a rank dies or stops, every other rank names it and none hangs."""

import atexit
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.quick import slow
from xfuser_cocodiff.engine.attention.reshard import reshard
from xfuser_cocodiff.engine.autotune import link_probe
from xfuser_cocodiff.engine.comm import deadline, failure_detection
from xfuser_cocodiff.engine.comm.comm_stream import CommStream
from xfuser_cocodiff.engine.comm.deadline import Deadline
from xfuser_cocodiff.engine.comm.failure_detection import UnresponsiveRankError
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.engine.topology.devices import CPU
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology

CULPRIT = 2
ABSENT = 0
"""Used in place of a signal: the rank is alive and does not call the collective."""


def make_work(name: str) -> Callable[[], object]:
    """Return a function in which all ranks communicate: an all-to-all by a plan, or a probe."""
    failure_detection.RESPONSE_SECONDS = 2.5
    group, cpu, topology = dist.group.WORLD, torch.device("cpu"), Topology.parse("2x2", 4)
    plans = None if name == "probe" else [Plan.parse(name, topology)]
    mesh = Mesh.over(group, topology, plans, timeout=timedelta(seconds=3))
    if name == "probe":
        return lambda: link_probe.Probe(mesh, cpu).measure()
    return lambda: reshard([torch.randn(1, 4, 512, 8)], 1, 2, mesh)


def communicate_until_lost(rank: int, name: str, end: int) -> None:
    """Communicate repeatedly; one rank is killed, stopped or absent from the third time on."""
    work = make_work(name)
    for number in range(1000):
        if number == 2 and rank == CULPRIT:
            if end == ABSENT:
                time.sleep(ranks.TIMEOUT)
            os.kill(os.getpid(), end)
        work()


@pytest.mark.parametrize(
    ("name", "end"),
    [("hierarchical", signal.SIGSTOP), slow("probe", signal.SIGKILL)],
)
def test_every_rank_names_the_lost_rank(name: str, end: int) -> None:
    results = ranks.outcomes(communicate_until_lost, 4, name, end, lost_rank=CULPRIT)
    for rank, result in enumerate(results):
        if rank != CULPRIT:
            assert isinstance(result, UnresponsiveRankError), result
            assert f"rank {CULPRIT} is lost or unresponsive" in str(result)


def test_rank_that_does_not_call_a_collective_is_named() -> None:
    results = ranks.outcomes(communicate_until_lost, 4, "hierarchical", ABSENT, lost_rank=CULPRIT)
    messages = [str(result) for rank, result in enumerate(results) if rank != CULPRIT]
    assert all(isinstance(result, UnresponsiveRankError) for rank, result in enumerate(results) if rank != CULPRIT), (
        results
    )
    # Ranks that wait in the same stage name it; the others report that all ranks are alive.
    assert any(f"rank {CULPRIT} is alive but did not call it" in text for text in messages), messages
    assert not any("lost or unresponsive" in text for text in messages), messages


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        dist.DistBackendError("NCCL error, unhandled cuda error: Cuda failure 2 'out of memory'"),
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0"),
    ],
)
def test_other_errors_are_raised_unchanged_without_a_check(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detection, "_check_ranks", lambda *_: pytest.fail("a check was started"))
    with pytest.raises(type(error)) as caught, failure_detection.report_failed_ranks([0], "node"):
        raise error
    assert caught.value is error
    assert not failure_detection._communicates()


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:40110",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 4000ms for recv",
        "oneCCL: transport failed",
    ],
)
def test_backend_errors_are_recognized(text: str) -> None:
    assert failure_detection.is_backend_error(RuntimeError(text))
    assert failure_detection.is_backend_error(dist.DistBackendError("NCCL communicator was aborted on rank 1"))


class Stream:
    """torch.Stream and the events of a device that ends no operation of the ranks but the culprit."""

    def __init__(self, *_: object) -> None:
        """Ignore the device."""

    def record_event(self) -> mock.Mock:
        return mock.Mock(query=lambda: dist.get_rank() == CULPRIT)

    def wait_event(self, event: mock.Mock) -> None:
        """Ignore the event."""

    def __enter__(self) -> None:
        """Ignore the stream."""

    __exit__ = __init__


def miss_the_deadline_of_an_all_to_all(rank: int, works: bool) -> list[str]:
    """Return what a rank logs if a device does not end an all-to-all in two stages, in which one rank takes no part.

    The host only queues it, or it waits itself while it does.
    """
    logged: list[str] = []
    failure_detection._logger.error = lambda text, *values: logged.append(text % values)
    failure_detection.RESPONSE_SECONDS = 2.0
    topology = Topology.parse("2x2", 4)
    plan = Plan.hierarchical(topology)
    mesh = Mesh.over(dist.group.WORLD, topology, [plan], timeout=timedelta(seconds=4))
    devices.capabilities, torch.Stream = lambda device_type: devices.Capabilities(), Stream
    torch.accelerator.current_stream = Stream
    mesh = dataclasses.replace(mesh, comm_stream=CommStream.on(CPU, ranks=range(4), timeout=4.0))
    mesh.comm_stream.run(lambda: mesh.all_to_all(torch.zeros(2, 2, 1), plan), Label("qkv", "block"))
    if rank != CULPRIT and works:
        mesh.comm_stream.run(lambda: time.sleep(6), Label("the link probe"))
    time.sleep(0 if works and rank != CULPRIT else 6)
    return logged


@pytest.mark.parametrize("works", [False, True])
def test_every_rank_names_the_rank_that_is_absent_from_an_all_to_all(works: bool) -> None:
    """Whichever stage it waits in, on a device whose host does not wait: one deadline covers all stages and ranks."""
    results = ranks.run(miss_the_deadline_of_an_all_to_all, 4, works)
    assert results.pop(CULPRIT) == []
    for rank, logged in zip((0, 1, 3), results, strict=True):
        assert logged == [
            f"cocodiff: rank {rank}: communication of qkv in block among ranks [0, 1, 2, 3] has taken more than 2 s: "
            f"rank {CULPRIT} is alive but did not call it"
        ]


def end_before_a_failure(rank: int, end: str, is_called: bool) -> None:
    """Raise what rank 0 reports after rank 2, which is in no group with it, has ended, and rank 1 is in its collective
    or not."""
    failure_detection.RESPONSE_SECONDS = 2.0
    failure_detection.start_heartbeat()
    dist.barrier()
    if rank == CULPRIT:
        if end == "an exception":
            sys.last_value = ValueError()  # as the interpreter sets it before it exits
        atexit._run_exitfuncs()
        os._exit(0)
    time.sleep(2 if rank else 3)  # rank 0 fails after rank 1 has called its collective
    if rank:
        with failure_detection.report_failed_ranks([0, 1], "node") if is_called else nullcontext():
            time.sleep(10)
        raise TimeoutError("skips the final barrier")
    try:
        with failure_detection.report_failed_ranks([0, 1], "node"):
            raise RuntimeError("gloo: timed out")
    except UnresponsiveRankError as error:
        error.args = (str(error).rpartition(": ")[2],)
        raise


@pytest.mark.parametrize(
    ("end", "is_called", "cause"),
    [
        ("exits", True, "one of them is too slow; rank 2 is not among them and ended earlier"),
        ("an exception", False, "rank 2 is lost or unresponsive"),
    ],
)
def test_a_rank_that_has_ended_normally_is_not_lost(end: str, is_called: bool, cause: str) -> None:
    """Such as the ranks of another Ulysses group, whose images were done earlier."""
    result, *_ = ranks.outcomes(end_before_a_failure, 3, end, is_called, lost_rank=CULPRIT)
    assert isinstance(result, UnresponsiveRankError) and str(result).endswith(cause), result


def survive_a_failure(rank: int) -> list[str]:
    """Return what checks of rank 1 find: right after rank 0 has failed, and after it has withdrawn its report."""
    failure_detection.RESPONSE_SECONDS, failure_detection._HEARTBEAT_SECONDS = 1.0, 0.1
    failure_detection.REPORT_SECONDS = 2.0
    failure_detection.start_heartbeat()
    dist.barrier()
    if rank == 0:
        with pytest.raises(UnresponsiveRankError), failure_detection.report_failed_ranks([0, 1], "node"):
            raise RuntimeError("gloo: timed out")
    causes = []
    for pause in (0, 3):
        dist.barrier()
        time.sleep(pause)
        if rank:
            causes.append(failure_detection._check_ranks([0, 1], 1, "node"))
    dist.barrier()
    return causes


def test_a_rank_that_survives_a_failure_withdraws_its_report() -> None:
    """Else it would never be named again."""
    _, (at_once, later) = ranks.run(survive_a_failure, 2)
    assert at_once.startswith("all of its ranks are alive and called it")
    assert later == "rank 0 is alive but did not call it"


def query_events(rank: int, libraries: tuple[str, ...]) -> list[str]:
    """Return the CUDA calls of the heartbeat thread and its queries, in order."""
    calls: list[str] = []

    class Library:
        def cuThreadExchangeStreamCaptureMode(self, mode: object) -> int:  # noqa: N802 (CUDA's name)
            calls.append(f"mode {mode._obj.value}")
            return 0

    def load(name: str) -> Library:
        if name not in libraries:
            raise OSError(name)
        return Library()

    failure_detection.RESPONSE_SECONDS, failure_detection._HEARTBEAT_SECONDS = 0.5, 0.1
    initialized = mock.patch.object(torch.cuda, "is_initialized", lambda: True)
    with mock.patch.object(deadline.ctypes, "CDLL", load), initialized:
        failure_detection.start_heartbeat()
        Deadline([0], "node", 0.1).end = mock.Mock(query=lambda: bool(calls.append("query")) or True)
        time.sleep(1)
        return list(calls)


@pytest.mark.parametrize(
    ("libraries", "expected"), [(("libcuda.so.1",), ["mode 2", "query"]), ((), [])], ids=["CUDA", "unknown"]
)
def test_events_are_queried_only_in_relaxed_capture_mode(libraries: tuple[str, ...], expected: list[str]) -> None:
    """By CUDA's default, a query would invalidate a graph that another thread is capturing."""
    assert ranks.run(query_events, 1, libraries) == [expected]
