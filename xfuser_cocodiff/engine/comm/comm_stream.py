"""Comm streams: ordered, asynchronous execution of communication, with a handle for each operation.

All ranks start the same operations in the same order, and a comm stream queues their collectives in that order. So no
two ranks are ever in different collectives, and an operation of several stages proceeds without its caller. There is
one kind for each place where messages are:

- :class:`DeviceStream`, on an accelerator: the host only queues communication, on a stream of its own. That stream
  waits for what the caller's stream holds when the operation starts, and the caller's stream waits for its result, so
  the host is never blocked.
- :class:`HostThread`, on a CPU, or for messages that an accelerator stages through host memory: communication takes
  host time, and a thread executes it, in the caller's stream if there is one. Collectives are in order if they start in
  order, so a single one starts in the caller's thread while the comm stream's is idle.

Memory that an operation allocates on a stream of its own is used on the caller's. After it is freed, the next operation
may reuse it: that one is queued behind everything the caller has queued by then, and so behind every use.
"""

import contextlib
import copy
import sys
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
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
        has_stream = devices.capabilities(device.type).is_asynchronous and not is_staged
        return DeviceStream(device, ranks, timeout) if has_stream else HostThread(device)

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
        return Handle(label, self._begin(label, begin, is_blocking), finish, begin)

    def run(self, work: Callable[[], T], label: Label = _ANY) -> T:
        """Run an operation after all earlier ones, and return its result."""
        handle: Handle[T] = Handle(label, self._execute(label, work, is_blocking=True), inputs=work)
        return handle.wait()

    @abstractmethod
    def _execute(self, label: Label, work: Callable[[], Any], is_blocking: bool) -> Await:
        """Start an operation and return the function that waits for it."""

    def _begin(self, label: Label, begin: Callable[[], Await], is_blocking: bool) -> Await:
        """Start a single collective and return the function that waits for it."""
        return self._execute(label, _in_range(lambda: begin()(), label), is_blocking)

    @abstractmethod
    def joined_to(self, whole: "CommStream") -> "CommStream":
        """Return a comm stream for the ranks of this one whose operations are in order with those of another one."""

    def close(self) -> None:  # noqa: B027 (a stream needs no end)
        """Release what the comm stream holds; it can be used again."""


class HostThread(CommStream):
    """Comm stream with a thread, which blocking operations and single collectives do without while it is idle."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)
        self._executor: ThreadPoolExecutor | None = None
        self._last_future: Callable[[], Future | None] = lambda: None
        """Weak reference to the future of the last operation, which the thread or a waiting caller keeps alive."""

    def _execute(self, label: Label, work: Callable[[], Any], is_blocking: bool) -> Await:
        if is_blocking:  # it begins when its caller waits
            return lambda: work() if self._is_idle() else self._submit(work).result()
        return self._submit(work).result

    def _begin(self, label: Label, begin: Callable[[], Await], is_blocking: bool) -> Await:
        return _in_range(begin, label)() if self._is_idle() else super()._begin(label, begin, is_blocking)

    def joined_to(self, whole: CommStream) -> CommStream:
        return whole

    def _is_idle(self) -> bool:
        """Return whether all earlier operations of the thread are over."""
        last = self._last_future()
        return last is None or last.done()

    def _submit(self, work: Callable[[], T]) -> "Future[T]":
        """Let the thread run an operation, under the caller's modes and in its stream."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "cocodiff")
        inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        has_stream = devices.capabilities(self.device.type).is_asynchronous
        stream = torch.accelerator.current_stream(self.device) if has_stream else nullcontext()

        def run() -> T:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients), stream:
                return work()

        future = self._executor.submit(run)
        self._last_future = weakref.ref(future)
        return future

    def close(self) -> None:
        """Let the thread end after its queued operations, without waiting; a later one starts another."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)  # a lost rank may keep it from ending
            self._executor = None


class DeviceStream(CommStream):
    """Comm stream with a stream of its own, on which the caller's thread queues operations.

    Args:
        device: the accelerator.
        ranks: the ranks that take part in operations, to be checked if one is overdue.
        timeout: seconds after which the backend fails a collective.
    """

    def __init__(self, device: torch.device, ranks: Sequence[int] = (), timeout: float = 0.0) -> None:
        super().__init__(device)
        self._ranks, self._timeout = ranks, timeout
        priority = {"priority": HIGH_PRIORITY} if devices.capabilities(device.type).has_stream_priorities else {}
        self._stream = torch.Stream(device, **priority)

    def _execute(self, label: Label, work: Callable[[], Any], is_blocking: bool) -> Await:
        ready = torch.accelerator.current_stream(self.device).record_event()
        deadline = Deadline(self._ranks, label, self._timeout) if self._has_deadlines() else None
        with self._stream:
            self._stream.wait_event(ready)
            try:
                result = work()
            finally:  # after an error, some of its collectives may be in flight
                end = self._stream.record_event()
                if deadline:
                    deadline.end = end

        def await_result() -> Any:
            torch.accelerator.current_stream(self.device).wait_event(end)
            return result

        return await_result

    def joined_to(self, whole: CommStream) -> CommStream:
        assert isinstance(whole, DeviceStream)
        joined = copy.copy(self)
        joined._stream = whole._stream
        return joined

    def _has_deadlines(self) -> bool:
        """Return whether a late operation can be noticed; not in the capture of a graph, whose events have no state."""
        return bool(self._ranks) and failure_detection.is_heartbeat_running() and not devices.is_captured(self.device)


def _in_range(work: Callable[[], T], label: Label) -> Callable[[], T]:
    """Return an operation that has a range in profiler traces while there is a profiler."""
    if not is_profiling():
        return work

    def run() -> T:
        with profiler_range("cocodiff", label.tensors, "collective"):
            return work()

    return run
