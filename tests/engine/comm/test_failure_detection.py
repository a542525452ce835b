"""A rank that dies or stops: every other rank says which one it was, and none of them hangs."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.quick import slow_but
from xfuser_cocodiff.engine.attention.reshard import reshard
from xfuser_cocodiff.engine.autotune import link_probe
from xfuser_cocodiff.engine.comm import failure_detection
from xfuser_cocodiff.engine.comm.failure_detection import UnresponsiveRankError
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.probing import link_survey

CULPRIT = 2
ABSENT = 0
"""Instead of a signal that ends the rank: it is somewhere else."""
ENDS = {signal.SIGKILL: "dies", signal.SIGSTOP: "stops"}


def start(rank: int, what: str) -> Callable[[], object]:
    """Something that all ranks communicate in: a plan's exchange, the engine's probe, a survey, or one of xDiT's."""
    failure_detection.RESPONSE_SECONDS = 2.5
    group, cpu, topology = dist.group.WORLD, torch.device("cpu"), Topology.parse("2x2", 4)
    if what == "survey":
        return lambda: link_survey.measure(group, None, cpu, timeout=20)
    if what in XDITS:
        return of_xdit(rank, what)
    plans = None if what == "probe" else [Plan.parse(what, topology)]
    mesh = Mesh.over(group, topology, plans, timeout=timedelta(seconds=3))
    if what == "probe":
        return lambda: link_probe.measure(mesh, cpu)
    return lambda: reshard([torch.randn(1, 4, 512, 8)], 1, 2, mesh)


def of_xdit(rank: int, method: str) -> Callable[[], object]:
    """Start xDiT's groups with the plugin in use, as a script has them."""
    from types import SimpleNamespace

    from xfuser import xFuserArgs
    from xfuser.core.distributed import get_sp_group, init_distributed_environment, initialize_runtime_state
    from xfuser.model_executor.layers import usp

    world = dist.get_world_size()
    init_distributed_environment(rank=rank, world_size=world)
    told = {"use_cocodiff": True, "cocodiff_timeout": 3, "cocodiff_a2a": "flat", "cocodiff_mode": "exact"}
    config = xFuserArgs(model="tiny", ulysses_degree=world, **told).create_config()[0]
    transformer = SimpleNamespace(config=SimpleNamespace(num_attention_heads=8))
    initialize_runtime_state(SimpleNamespace(transformer=transformer), config)
    tensor = torch.full((4,), float(rank))
    if method == "all_to_all":
        return lambda: usp._sdpa_all_to_all_single(tensor)
    assert torch.equal(get_sp_group().all_gather(tensor).view(4, 4)[:, 0], torch.arange(4.0))
    return lambda: getattr(get_sp_group(), method)(tensor)


def until_lost(rank: int, what: str, end: int) -> None:
    """Communicate again and again; one rank meets its end on the way."""
    work = start(rank, what)
    for number in range(1000):
        if number == 2 and rank == CULPRIT:
            if end == ABSENT:
                time.sleep(ranks.TIMEOUT)
            os.kill(os.getpid(), end)
        work()


PLANS, XDITS = ("flat", "flat*", "hierarchical", "hierarchical:node,gpu"), ("all_gather", "broadcast", "all_to_all")


@pytest.mark.parametrize(
    ("what", "end"),
    slow_but(
        [("hierarchical", signal.SIGSTOP), ("all_gather", signal.SIGKILL)],
        [*itertools.product([*PLANS, "probe", "survey"], ENDS), *((method, signal.SIGKILL) for method in XDITS)],
    ),
    ids=lambda value: ENDS.get(value, value),
)
def test_every_rank_names_the_one_that_was_lost(what: str, end: int) -> None:
    results = ranks.outcomes(until_lost, 4, what, end, lost_rank=CULPRIT)
    for rank, result in enumerate(results):
        if rank != CULPRIT:
            assert isinstance(result, UnresponsiveRankError), result
            assert f"rank {CULPRIT} is lost or unresponsive" in str(result)


def test_every_rank_names_the_one_that_did_not_come_to_an_exchange() -> None:
    results = ranks.outcomes(until_lost, 4, "hierarchical", ABSENT, lost_rank=CULPRIT)
    said = [str(result) for rank, result in enumerate(results) if rank != CULPRIT]
    assert all(isinstance(result, UnresponsiveRankError) for rank, result in enumerate(results) if rank != CULPRIT), (
        results
    )
    # Who waits for it in the same stage can tell; the others know that nobody is gone.
    assert any(f"rank {CULPRIT} is alive but did not call it" in text for text in said), said
    assert not any("gone" in text for text in said), said


def come_late_then_never(rank: int, text: str) -> str:
    """One rank comes late to an exchange of shares that no buffer holds, which all wait for, and not to the next."""
    failure_detection.RESPONSE_SECONDS = 2.5
    topology = Topology.parse("flat", 3)
    plan = Plan.parse(text, topology)
    mesh = Mesh.over(dist.group.WORLD, topology, [plan], timeout=timedelta(seconds=3))
    sent = torch.arange(3.0)[:, None] + torch.full((3, 1 << 20), 10.0 * rank)
    if rank == CULPRIT:
        time.sleep(0.5)
    received = mesh.all_to_all(sent, plan)
    assert torch.equal(received, 10 * torch.arange(3.0)[:, None] + torch.full((3, 1 << 20), float(rank)))
    if rank == CULPRIT:
        time.sleep(ranks.TIMEOUT)
    said: list[Exception] = []

    def exchange() -> None:
        try:
            mesh.all_to_all(sent, plan)
        except UnresponsiveRankError as error:
            said.append(error)

    waiting = threading.Thread(target=exchange, daemon=True)
    waiting.start()
    waiting.join(40)  # a guard, since nothing else ends a wait that has no timeout
    raise said[0] if said else TimeoutError("this rank waits on")


@pytest.mark.parametrize("plan", slow_but(["flat*"], ["flat*", "flat"]))
def test_a_stage_waits_for_all_its_ranks_and_not_for_ever(plan: str) -> None:
    results = ranks.outcomes(come_late_then_never, 3, plan, lost_rank=CULPRIT)
    for result in results[:CULPRIT]:
        assert isinstance(result, UnresponsiveRankError), result
        assert f"rank {CULPRIT} is alive but did not call it" in str(result)


def test_xdits_collectives_are_left_alone_where_the_plugin_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from xfuser_cocodiff.xdit.session import collective_failures

    def fail(self: object) -> None:
        raise RuntimeError("Connection closed by peer")

    group = SimpleNamespace(ranks=[0])
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer$"):
        collective_failures._with_detection(fail)(group)
    monkeypatch.setattr(failure_detection, "_stages", {})  # where a rank fails stays known
    monkeypatch.setattr(failure_detection, "is_heartbeat_running", lambda: True)
    monkeypatch.setattr(
        failure_detection, "_describe_failure", lambda group, stage, failure: f"{group} {stage} {failure}"
    )
    with pytest.raises(UnresponsiveRankError, match=r"\[0\] xDiT's fail failed \(Connection closed by peer\)"):
        collective_failures._with_detection(fail)(group)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:126] DefaultCPUAllocator: can't allocate memory"),
        dist.DistBackendError("NCCL error, unhandled cuda error: Cuda failure 2 'out of memory'"),
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0"),
        NotImplementedError("There were no tensor arguments to this function: connection"),
        ValueError("a bad value of gloo"),
    ],
)
def test_other_errors_stay_what_they_are_at_once(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detection, "_check_ranks", lambda *_: pytest.fail("a check was started"))
    with pytest.raises(type(error)) as caught, failure_detection.report_failed_ranks([0], "node"):
        raise error
    assert caught.value is error
    assert failure_detection._active_stages() == ""


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:40110",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 4000ms for recv",
        "Operation timed out!",
        "oneCCL: transport failed",
    ],
)
def test_errors_of_backends_are_known(text: str) -> None:
    assert failure_detection.is_backend_error(RuntimeError(text))
    assert failure_detection.is_backend_error(dist.DistBackendError("NCCL communicator was aborted on rank 1"))


def test_threads_communicate_beside_each_other() -> None:
    """The lane's thread and the main one: neither must hide where the other is."""
    inside, leave = threading.Event(), threading.Event()

    def comm_stream() -> None:
        with failure_detection.report_failed_ranks([0], "node"):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=comm_stream)
    thread.start()
    inside.wait(60)
    with failure_detection.report_failed_ranks([0], "outer"):
        with failure_detection.report_failed_ranks([0], "flat"):
            assert failure_detection._active_stages() == "node, flat"
        assert failure_detection._active_stages() == "node, outer"
    assert failure_detection._active_stages() == "node"
    leave.set()
    thread.join()
    assert failure_detection._active_stages() == ""


def alarm_twice(rank: int, end: int) -> None:
    """All come late to an exchange, which a device brings to its end after all; then one is lost, on its way to another
    one."""
    said: list[str] = []
    failure_detection._logger.error = lambda text, *values: said.append(text % values)
    failure_detection.RESPONSE_SECONDS = 2.0
    failure_detection.start_heartbeat()
    dist.barrier()
    comes = threading.Event()
    failure_detection.set_deadline(comes.is_set, [0, 1, CULPRIT], "node", 3.0)
    failure_detection.set_deadline(lambda: True, [0, 1, CULPRIT], "of what is done nothing is said", 0.1)
    while not said:
        time.sleep(0.1)
    dist.barrier()
    comes.set()
    time.sleep(2)
    dist.barrier()
    if rank != CULPRIT:
        failure_detection.set_deadline(lambda: False, [0, 1, CULPRIT], "gpu", 3.0)
    elif end != ABSENT:
        os.kill(os.getpid(), end)
    time.sleep(8)
    raise UnresponsiveRankError(*said)  # no barrier then, to which one rank would not come


@pytest.mark.slow  # a rank that communicates again after a failure is quick
@pytest.mark.parametrize(
    ("end", "expected"), [(ABSENT, "is alive but did not call it"), (signal.SIGKILL, "is lost or unresponsive")]
)
def test_after_a_false_alarm_ranks_go_on_to_answer(end: int, expected: str) -> None:
    found = ranks.outcomes(alarm_twice, 3, end, lost_rank=CULPRIT if end else None)
    for result in found[:CULPRIT]:
        first, second = result.args
        assert "all of its ranks are alive and called it" in first
        assert f"rank {CULPRIT} {expected}" in second


def recover(rank: int) -> tuple[str, list[str | None]]:
    """What a caller says after another one that was lost within its call; and what is known of its own failure after
    a stage in another group, and after one in the same."""
    failure_detection.RESPONSE_SECONDS, failure_detection._HEARTBEAT_SECONDS = 1.0, 0.1
    failure_detection.start_heartbeat()
    dist.barrier()
    world, other, said, known = dist.group.WORLD, [0, 1], "", []

    def communicates(group: object) -> None:
        with failure_detection.report_failed_ranks(group, "node"):
            dist.barrier()
        time.sleep(4 * failure_detection._HEARTBEAT_SECONDS)
        dist.barrier()
        known.append(failure_detection._read(dist.distributed_c10d._get_default_store(), failure_detection._REPORT, 0))
        dist.barrier()

    if rank == 0:
        dist.distributed_c10d._get_default_store().add(failure_detection._CHECKS, 1)  # by the one that was lost
        with pytest.raises(UnresponsiveRankError) as raised, failure_detection.report_failed_ranks(world, "node"):
            raise RuntimeError("gloo: timed out")
        said = str(raised.value)
    dist.barrier()
    communicates(other)
    communicates(world)
    return said, known


def test_a_rank_that_communicates_again_no_longer_fails() -> None:
    (said, known), (_, seen) = ranks.run(recover, 2)
    assert "rank 1 is alive but did not call it" in said
    assert known == seen == ["node", ""]


def ask_in_order(rank: int, libraries: tuple[str, ...]) -> list[str]:
    """What the thread that listens does of which CUDA knows, where a device captures graphs."""
    did: list[str] = []

    class Library:
        def cuThreadExchangeStreamCaptureMode(self, mode: object) -> int:  # noqa: N802 (CUDA's name)
            did.append(f"mode {mode._obj.value}")
            return 0

    def load(name: str) -> Library:
        if name not in libraries:
            raise OSError(name)
        return Library()

    failure_detection.RESPONSE_SECONDS, failure_detection._HEARTBEAT_SECONDS = 0.5, 0.1
    initialised = mock.patch.object(torch.cuda, "is_initialized", lambda: True)
    with mock.patch.object(failure_detection.ctypes, "CDLL", load), initialised:
        failure_detection.start_heartbeat()
        failure_detection.set_deadline(lambda: bool(did.append("query")) or True, [0], "node", 0.1)
        time.sleep(1)
        return list(did)


@pytest.mark.parametrize(
    ("libraries", "expected"), [(("libcuda.so.1",), ["mode 2", "query"]), ((), [])], ids=["CUDA", "unknown"]
)
def test_an_event_is_asked_only_where_that_spoils_no_capture(libraries: tuple[str, ...], expected: list[str]) -> None:
    """Of graphs, in another thread: by CUDA's default, nobody may ask an event meanwhile."""
    assert ranks.run(ask_in_order, 1, libraries) == [expected]
