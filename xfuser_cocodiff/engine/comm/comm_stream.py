"""Comm streams: ordered, asynchronous execution of communication, with a handle for each operation.

All ranks start the same operations in the same order, and a comm stream queues their collectives in that order. So no
two ranks are ever in different collectives, and an operation of several stages proceeds without its caller. There is
one kind for each place where messages are:

- :class:`HostThread`, on a CPU: communication takes host time, and a thread executes it. Collectives are in order if
  they start in order, so a single one starts in the caller's thread while the comm stream's is idle.
- :class:`DeviceStream`, on an accelerator: the host only queues communication, on a stream of its own. That stream
  waits for what the caller's stream holds when the operation starts, and the caller's stream waits for its result, so
  the host is never blocked.
- :class:`StagedThread`, on an accelerator whose messages go through host memory: these do block the host, so a thread
  queues operations on such a stream.

Memory that an operation allocates belongs to the comm stream and is used on the caller's stream. After it is freed, the
next operation may reuse it: that operation is queued behind everything the caller has queued by then, and so behind
every use. A thread may queue an operation later, when the caller has freed more; only in that case the allocator is
told of the second stream (`record_stream`), since it then keeps memory while the host is ahead of the device.
"""

import contextlib
import sys
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch

from xfuser_cocodiff.engine.comm import failure_detection
from xfuser_cocodiff.engine.comm.deadline import Deadline
from xfuser_cocodiff.engine.comm.traffic import Label, is_profiling, profiler_range
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.engine.topology.devices import CPU

T = TypeVar("T")
Await = Callable[[], Any]
"""Waits for an operation and returns its result, or raises its error."""
HIGH_PRIORITY = -1
"""Priority of a comm stream, on devices with priorities: other ranks wait for its messages, so they should not queue
behind this rank's computation."""
_ANY = Label("any")


class Handle(Generic[T]):
    """Operation in flight, to be waited for exactly once.

    It keeps the buffers of the operation alive until then. A started operation completes whatever happens to its
    handle, because peers take part in it.
    """

    def __init__(
        self, label: Label, await_result: Await, finish: Callable[[Any], T] | None = None, inputs: object = None
    ) -> None:
        """Create a handle.

        Args:
            label: tensors and layer, for messages.
            await_result: waits for the operation and returns its result.
            finish: converts the result, in the caller's thread.
            inputs: what the operation reads, to be kept alive.
        """
        self.label = label
        self._await_result: Await | None = await_result
        self._finish, self._inputs = finish, inputs
        # The exception that the caller is handling when the operation starts, for example in a retry.
        self._handled_error = None if torch.compiler.is_compiling() else sys.exc_info()[1]

    def wait(self) -> T:
        """Wait for the operation and return its result, or raise its error.

        Raises:
            RuntimeError: the handle was waited for before.
        """
        if self._await_result is None:
            raise RuntimeError(f"{self.label} was waited for twice")
        await_result, self._await_result, self._handled_error = self._await_result, None, None
        with profiler_range("cocodiff", self.label.tensors, "wait"):
            result = await_result()
        self._inputs = None
        return self._finish(result) if self._finish else result

    def drain(self) -> None:
        """Wait for the operation, unless that was done, and drop its result; used when the caller leaves early.

        `finish` runs too, since other ranks depend on it. An error of the operation is raised, unless another exception
        has come up since the operation started: that one is the cause.
        """
        if self._await_result is not None:
            is_caused = sys.exc_info()[1] not in (None, self._handled_error)
            with contextlib.suppress(*[Exception] if is_caused else []):
                self.wait()

    def __del__(self) -> None:
        if self._await_result is not None:
            warnings.warn(f"{self.label} was dropped without being waited for", ResourceWarning, stacklevel=2)


class CommStream(ABC):
    """Executes operations in the order in which they are started.

    Args:
        device: device of the operations' tensors.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device

    @staticmethod
    def on(
        device: torch.device, is_staged: bool = False, ranks: Sequence[int] = (), timeout: float = 0.0
    ) -> "CommStream":
        """Return a comm stream for operations on a device.

        Args:
            device: device of the operations' tensors.
            is_staged: whether messages go through host memory, so that operations block the host.
            ranks: the ranks that take part in operations, to be checked if one takes too long.
            timeout: seconds after which the backend fails a collective.
        """
        if not devices.capabilities(device.type).is_asynchronous:
            return HostThread(device)
        return StagedThread(device) if is_staged else DeviceStream(device, ranks, timeout)

    def start(
        self,
        label: Label,
        work: Callable[[], Any],
        finish: Callable[[Any], T] | None = None,
        is_blocking: bool = False,
    ) -> Handle[T]:
        """Start an operation asynchronously, under the caller's inference and gradient modes.

        Args:
            label: tensors and layer.
            work: the operation.
            finish: converts the result, in the caller's thread, after the wait.
            is_blocking: whether the caller waits for it right away and computes nothing meanwhile.
        """
        return Handle(label, self._execute(label, _in_range(work, label), is_blocking), finish, work)

    def start_collective(
        self,
        label: Label,
        begin: Callable[[], Await],
        finish: Callable[[Any], T] | None = None,
        is_blocking: bool = False,
    ) -> Handle[T]:
        """Start an operation that is a single collective; see :meth:`start`.

        Args:
            label: tensors and layer.
            begin: starts the collective and returns a function that waits for its result.
            finish: converts the result, in the caller's thread, after the wait.
            is_blocking: whether the caller waits for it right away and computes nothing meanwhile.
        """
        return self.start(label, lambda: begin()(), finish, is_blocking)

    def run(self, work: Callable[[], T], label: Label = _ANY) -> T:
        """Run an operation after all earlier ones, and return its result."""
        handle: Handle[T] = Handle(label, self._execute(label, work, is_blocking=True), inputs=work)
        return handle.wait()

    @abstractmethod
    def _execute(self, label: Label, work: Callable[[], Any], is_blocking: bool) -> Await:
        """Start an operation and return the function that waits for it."""

    @abstractmethod
    def close(self) -> None:
        """Release what the comm stream holds; it can be used again."""


class CommThread(CommStream):
    """Comm stream with a thread."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)
        self._executor: ThreadPoolExecutor | None = None

    def _submit(self, work: Callable[[], T]) -> "Future[T]":
        """Let the thread run an operation, under the caller's modes."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "cocodiff")
        inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def run() -> T:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                return work()

        return self._executor.submit(run)

    def close(self) -> None:
        """Let the thread end after its queued operations, without waiting; a later one starts another."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)  # a lost rank may keep it from ending
            self._executor = None


class HostThread(CommThread):
    """Comm stream on a CPU: a thread, which what the caller waits for at once does not need while it is idle."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)
        self._last_future: Callable[[], Future | None] = lambda: None
        """Weak reference to the future of the last operation, which the thread or a waiting caller keeps alive."""

    def start_collective(
        self,
        label: Label,
        begin: Callable[[], Await],
        finish: Callable[[Any], T] | None = None,
        is_blocking: bool = False,
    ) -> Handle[T]:
        """Start an operation that is a single collective, in the caller's thread if the comm stream's is idle."""
        if not self._is_idle():
            return super().start_collective(label, begin, finish, is_blocking)
        with profiler_range("cocodiff", label.tensors, "exchange"):
            wait = begin()
        return Handle(label, wait, finish, begin)

    def _execute(self, label: Label, work: Callable[[], Any], is_blocking: bool) -> Await:
        if is_blocking:  # it begins when its caller waits
            return lambda: work() if self._is_idle() else self._queue(work).result()
        return self._queue(work).result

    def _queue(self, work: Callable[[], T]) -> "Future[T]":
        future = self._submit(work)
        self._last_future = weakref.ref(future)
        return future

    def _is_idle(self) -> bool:
        """Return whether all earlier operations of the thread are over."""
        last = self._last_future()
        return last is None or last.done()


class StagedThread(CommThread):
    """Comm stream on an accelerator whose messages block the host: a thread that queues operations on a stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = _new_stream(device)

    def _execute(self, label: Label, work: Callable[[], Any], is_blocking: bool) -> Await:
        ready = torch.accelerator.current_stream(self.device).record_event()
        future = self._submit(lambda: _run_on(self._stream, ready, work))

        def await_result() -> Any:
            result, end = future.result()
            caller = torch.accelerator.current_stream(self.device)
            caller.wait_event(end)
            for tensor in _accelerator_tensors(result):
                tensor.record_stream(caller)
            return result

        return await_result


class DeviceStream(CommStream):
    """Comm stream on an accelerator: a stream, on which the caller's thread queues operations.

    Args:
        device: the accelerator.
        ranks: the ranks that take part in operations, to be checked if one is overdue.
        timeout: seconds after which the backend fails a collective.
    """

    def __init__(self, device: torch.device, ranks: Sequence[int] = (), timeout: float = 0.0) -> None:
        super().__init__(device)
        self._ranks, self._timeout = ranks, timeout
        self._stream = _new_stream(device)

    def _execute(self, label: Label, work: Callable[[], Any], is_blocking: bool) -> Await:
        ready = torch.accelerator.current_stream(self.device).record_event()
        with self._deadline(label) as deadline:
            result, end = _run_on(self._stream, ready, work)
            if deadline:
                deadline.end = end

        def await_result() -> Any:
            torch.accelerator.current_stream(self.device).wait_event(end)
            return result

        return await_result

    def close(self) -> None:
        """Do nothing: a stream needs no end."""

    def _deadline(self, label: Label) -> AbstractContextManager[Deadline | None]:
        """Return the deadline of an operation; none in the capture of a graph, whose events have no state."""
        is_watched = self._ranks and failure_detection.is_heartbeat_running() and not devices.is_captured(self.device)
        return Deadline(self._ranks, label, self._timeout) if is_watched else nullcontext()


def _new_stream(device: torch.device) -> torch.Stream:
    has_priorities = devices.capabilities(device.type).has_stream_priorities
    return torch.Stream(device, priority=HIGH_PRIORITY) if has_priorities else torch.Stream(device)


def _run_on(stream: torch.Stream, ready: torch.Event, work: Callable[[], T]) -> tuple[T, torch.Event]:
    """Queue an operation on a stream, behind an event; return its result and the event behind it."""
    with stream:
        stream.wait_event(ready)
        return work(), stream.record_event()


def _in_range(work: Callable[[], T], label: Label) -> Callable[[], T]:
    """Return an operation that has a range in profiler traces while there is a profiler."""
    if not is_profiling():
        return work

    def run() -> T:
        with profiler_range("cocodiff", label.tensors, "exchange"):
            return work()

    return run


def _accelerator_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors on accelerators in nested tuples and lists."""
    if isinstance(value, torch.Tensor):
        if devices.capabilities(value.device.type).is_asynchronous:
            yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _accelerator_tensors(each)
