"""Comm streams and their handles."""

import threading
import time
import warnings
from collections.abc import Callable

import pytest

from xfuser_cocodiff.engine.comm.comm_stream import Handle, HostThread
from xfuser_cocodiff.engine.comm.traffic import Label


def test_work_runs_in_order_beside_the_caller() -> None:
    comm_stream, order, gate = HostThread(), [], threading.Event()

    def slow() -> str:
        gate.wait()
        order.append("first")
        return "first"

    first = comm_stream.start(Label("first"), slow)
    second = comm_stream.start(Label("second"), lambda: order.append("second"))
    order.append("caller")
    gate.set()
    assert second.wait() is None
    assert first.wait() == "first"
    assert order == ["caller", "first", "second"]


def test_a_single_collective_starts_at_once_but_not_before_others() -> None:
    """All ranks then start their collectives in the same order, whichever of them are still busy."""
    comm_stream, order, gate = HostThread(), [], threading.Event()

    def begin(name: str) -> Callable[[], tuple[str, int]]:
        order.append(name)
        thread = threading.get_ident()
        return lambda: (name, thread)

    alone = comm_stream.start_collective(Label("v"), lambda: begin("alone"))
    assert order == ["alone"]
    slow = comm_stream.start(Label("qk"), lambda: (gate.wait(), order.append("slow")))
    behind = comm_stream.start_collective(Label("o"), lambda: begin("behind"), lambda result: result)
    gate.set()
    assert behind.wait()[1] != threading.get_ident()
    assert alone.wait() == ("alone", threading.get_ident())
    slow.wait()
    assert order == ["alone", "slow", "behind"]


def test_blocking_work_runs_in_order_and_in_the_callers_thread() -> None:
    comm_stream, order = HostThread(), []
    first = comm_stream.start(Label("first"), lambda: (time.sleep(0.1), order.append("first")))
    comm_stream.start(Label("second"), lambda: order.append("second"), is_blocking=True).wait()
    first.wait()
    assert order == ["first", "second"]
    assert comm_stream.start(Label("third"), threading.get_ident, is_blocking=True).wait() == threading.get_ident()
    comm_stream.start(Label("fourth"), lambda: order.append("fourth"), is_blocking=True).drain()
    assert order[-1] == "fourth", "peers wait for it"


def test_dropped_handle_warns_and_its_work_completes() -> None:
    comm_stream, done = HostThread(), []
    handle = comm_stream.start(Label("qkv"), lambda: done.append(1))
    with pytest.warns(ResourceWarning, match="communication of qkv was dropped"):
        del handle
    comm_stream.start(Label("next"), lambda: None).wait()
    assert done


def test_drained_handle_completes_without_a_warning() -> None:
    done = []

    def fail(_: object) -> None:
        raise MemoryError

    def handle_of_failure() -> Handle:
        return HostThread().start(Label("qkv"), lambda: (time.sleep(0.05), done.append(1)), fail)

    with pytest.raises(MemoryError):  # its own error is raised
        handle_of_failure().drain()
    handle = handle_of_failure()
    with pytest.raises(ZeroDivisionError):
        try:
            done[5 // 0]
        finally:
            handle.drain()  # an error of the caller takes precedence
    assert done == [1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del handle


def test_errors_are_raised_by_wait_and_drain() -> None:
    comm_stream = HostThread()
    handle = comm_stream.start(Label("work"), lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        handle.wait()
    with pytest.raises(ZeroDivisionError):
        comm_stream.start(Label("work"), lambda: 1 // 0).drain()
    assert comm_stream.start(Label("work"), lambda: 1).wait() == 1
