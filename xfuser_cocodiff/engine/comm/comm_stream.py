"""Comm streams: ordered, asynchronous execution of communication, with a handle for each operation.

All ranks start the same operations in the same order, and a comm stream executes them in that order. So no two ranks
are ever in different collectives, and an operation of several stages proceeds without its caller.

On a CPU, communication takes host time, and a thread executes it. On an accelerator the host only queues it, on a
stream of its own: that stream waits for what the caller's stream holds when the operation starts, and the caller's
stream waits for its result, so the host is never blocked. Messages staged through host memory do block the host, so a
thread queues those.

Memory that an operation allocates belongs to the comm stream and is used on the caller's stream. After it is freed, the
next operation may reuse it: that operation is queued behind everything the caller has queued by then, and so behind
every use. A thread may queue an operation later, when the caller has freed more; only in that case the allocator is
told of the second stream (`record_stream`), since it then keeps memory while the host is ahead of the device.
"""

import contextlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch

from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.engine.topology.devices import CPU

T = TypeVar("T")
HIGH_PRIORITY = -1
"""Priority of a comm stream, on devices with priorities: other ranks wait for its messages, so they should not queue
behind this rank's computation."""


class Handle(Generic[T]):
    """Operation in flight, to be waited for exactly once.

    It keeps the buffers of the operation alive until then. A started operation completes whatever happens to its
    handle, because peers take part in it.
    """

    def __init__(
        self,
        name: str,
        await_result: Callable[[], Any],
        finish: Callable[[Any], T] | None = None,
        wait_context: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        """Create a handle.

        Args:
            name: name of the operation, for messages.
            await_result: waits for the operation and returns its result.
            finish: converts the result, in the caller's thread.
            wait_context: context manager around the wait.
        """
        self.name = name
        self._await_result: Callable[[], Any] | None = await_result
        self._finish, self._wait_context = finish, wait_context
        # The exception that the caller is handling when the operation starts, for example in a retry.
        self._handled_error = None if torch.compiler.is_compiling() else sys.exc_info()[1]

    def wait(self) -> T:
        """Wait for the operation and return its result, or raise its error.

        Raises:
            RuntimeError: the handle was waited for before.
        """
        if self._await_result is None:
            raise RuntimeError(f"{self.name} was waited for twice")
        await_result, self._await_result, self._handled_error = self._await_result, None, None
        with self._wait_context():
            result = await_result()
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
            warnings.warn(f"{self.name} was dropped without being waited for", ResourceWarning, stacklevel=2)


class CommStream:
    """Executes operations in the order in which they are started.

    Args:
        device: device of the operations' tensors.
        staged: whether messages go through host memory, so that operations block the host.
    """

    def __init__(self, device: torch.device = CPU, staged: bool = False) -> None:
        self.device, self.staged = device, staged
        self._stream = _new_stream(device)
        self._executor: ThreadPoolExecutor | None = None
        self._last_future: Callable[[], Future | None] = lambda: None
        """Weak reference to the future of the last operation, which the thread or a waiting caller keeps alive."""

    def start(
        self,
        name: str,
        work: Callable[[], Any],
        finish: Callable[[Any], T] | None = None,
        wait_context: Callable[[], AbstractContextManager] = nullcontext,
        is_blocking: bool = False,
    ) -> Handle[T]:
        """Start an operation asynchronously, under the caller's inference and gradient modes.

        Args:
            name: name of the operation, for messages.
            work: the operation.
            finish: converts the result, in the caller's thread, after the wait.
            wait_context: context manager around the wait.
            is_blocking: whether the caller waits for it right away and computes nothing meanwhile. A thread would only
                add latency then: without a stream, the operation runs in the caller's thread, during the wait.
        """
        if is_blocking and self._stream is None:
            return Handle(name, lambda: self.run(work), finish, wait_context)
        queue = self._on_stream(work)
        if self._stream is not None and not self.staged:
            queued = queue()
            return Handle(name, lambda: self._synchronized(*queued, work), finish, wait_context)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "cocodiff")
        inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def run() -> tuple[Any, torch.Event | None]:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                return queue()

        future = self._executor.submit(run)
        self._last_future = weakref.ref(future)

        def await_result() -> Any:
            result, end = future.result()
            return self._synchronized(result, end, work)

        return Handle(name, await_result, finish, wait_context)

    def run(self, work: Callable[[], T]) -> T:
        """Run an operation after all earlier ones have completed or are queued, and return its result."""
        last = self._last_future()
        if last is None or last.done():
            return work()  # in the caller's thread: the comm stream's own would only add latency
        return self.start("", work).wait()

    def close(self) -> None:
        """Let the thread end after its queued operations, without waiting; a later one starts another."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)  # a lost rank may keep it from ending
            self._executor = None

    def _on_stream(self, work: Callable[[], Any]) -> Callable[[], tuple[Any, torch.Event | None]]:
        """Return a function that queues an operation on the stream, behind what the caller has queued by now.

        It returns the result and the event that marks the end of the operation.
        """
        stream = self._stream
        if stream is None:
            return lambda: (work(), None)
        ready = torch.accelerator.current_stream(self.device).record_event()

        def queue() -> tuple[Any, torch.Event]:
            with stream:
                stream.wait_event(ready)
                return work(), stream.record_event()

        return queue

    def _synchronized(self, result: Any, end: torch.Event | None, work: Callable) -> Any:
        """Make the caller's stream wait for an operation and return its result.

        `work` is a parameter to keep its inputs alive until here.
        """
        if end is not None:
            caller = torch.accelerator.current_stream(self.device)
            caller.wait_event(end)
            if self.staged:
                for tensor in _accelerator_tensors(result):
                    tensor.record_stream(caller)
        return result


def _new_stream(device: torch.device) -> torch.Stream | None:
    capabilities = devices.capabilities(device.type)
    if not capabilities.is_asynchronous:
        return None
    return torch.Stream(device, priority=HIGH_PRIORITY) if capabilities.has_stream_priorities else torch.Stream(device)


def _accelerator_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors on accelerators in nested tuples and lists."""
    if isinstance(value, torch.Tensor):
        if devices.capabilities(value.device.type).is_asynchronous:
            yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _accelerator_tensors(each)
