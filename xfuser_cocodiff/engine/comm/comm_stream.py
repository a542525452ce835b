"""The lane: where exchanges run one after the other while their caller computes, each behind a handle.

All ranks start the same exchanges in the same order, and a lane keeps that order whatever waits for what. So no rank
meets another in the wrong collective, and an exchange of several stages needs nobody to push it from one to the next.

A lane is a thread, a stream, or both. Work for a CPU takes time on the host, so a thread does it. Work for an
accelerator is only queued by the host; it goes to a stream of its own, which waits for what the caller's stream holds
when the work is started, and for which the caller's stream waits in turn: nothing holds up the host. Messages that are
staged through the host's memory do hold it up, so a thread queues them.

What work makes is memory of the lane's stream, and is used on the caller's. Once it is dropped, the next work may get
it: that is queued when it is started, behind all that the caller has queued by then, and so behind every use. A thread
may queue work later, when the caller has dropped more; only there the allocator is told who uses what, since it then
keeps memory for as long as the host is ahead of the device.
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

from xfuser_cocodiff.engine.topology import devices as devices
from xfuser_cocodiff.engine.topology.devices import CPU

T = TypeVar("T")
_HIGH = -1
"""Priority of a lane's stream, where there are priorities: what others wait for should not queue behind what this rank
computes."""


class Handle(Generic[T]):
    """Work under way in a lane, to be waited for exactly once.

    It holds what the work needs until then. Once started, work comes to its end whatever happens to its handle: peers
    take part in it.
    """

    def __init__(
        self,
        name: str,
        arrive: Callable[[], Any],
        finish: Callable[[Any], T] | None = None,
        holds: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        """Make a handle.

        Args:
            name: for messages.
            arrive: waits for the work and returns what came of it.
            finish: what the caller runs on that.
            holds: context of the wait.
        """
        self.name = name
        self._arrive: Callable[[], Any] | None = arrive
        self._finish, self._holds = finish, holds
        # What the caller deals with already when the work starts, as where it tries again after an error.
        self._handled = None if torch.compiler.is_compiling() else sys.exc_info()[1]

    def wait(self) -> T:
        """What the work returns, or the error that it raises.

        Raises:
            RuntimeError: it was waited for before.
        """
        if self._arrive is None:
            raise RuntimeError(f"{self.name} was waited for twice")
        arrive, self._arrive, self._handled = self._arrive, None, None
        with self._holds():
            result = arrive()
        return self._finish(result) if self._finish else result

    def drain(self) -> None:
        """Wait, if nobody did, and drop what came of it: for callers that are sent elsewhere.

        What the caller runs on the result is run too: other ranks go by it. An error of it is raised unless another one
        has come up since the work was started, which is the cause.
        """
        if self._arrive is not None:
            is_caused = sys.exc_info()[1] not in (None, self._handled)
            with contextlib.suppress(*[Exception] if is_caused else []):
                self.wait()

    def __del__(self) -> None:
        if self._arrive is not None:
            warnings.warn(f"{self.name} was dropped without being waited for", ResourceWarning, stacklevel=2)


class CommStream:
    """Runs work in the order in which it is handed in.

    Args:
        device: where the work's tensors lie.
        staged: whether the work waits for the device.
    """

    def __init__(self, device: torch.device = CPU, staged: bool = False) -> None:
        self.device, self.staged = device, staged
        self._stream = _stream(device)
        self._executor: ThreadPoolExecutor | None = None
        self._last: Callable[[], Future | None] = lambda: None
        """What was started last, as long as somebody else holds it: the thread, or who waits for it."""

    def start(
        self,
        name: str,
        work: Callable[[], Any],
        finish: Callable[[Any], T] | None = None,
        holds: Callable[[], AbstractContextManager] = nullcontext,
        is_blocking: bool = False,
    ) -> Handle[T]:
        """Run work behind the caller's back, under the caller's inference and gradient modes.

        Args:
            name: for messages.
            work: what to run.
            finish: what the caller runs on the result when it has waited.
            holds: context of its wait.
            is_blocking: whether the caller waits for it next, and computes nothing meanwhile: then a thread would only
                cost time, and without a stream it runs in the caller's, when it is waited for.
        """
        if is_blocking and self._stream is None:
            return Handle(name, lambda: self.run(work), finish, holds)
        queue = self._on_stream(work)
        if self._stream is not None and not self.staged:
            queued = queue()
            return Handle(name, lambda: self._joined(*queued, work), finish, holds)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "cocodiff")
        inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def run() -> tuple[Any, torch.Event | None]:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                return queue()

        future = self._executor.submit(run)
        self._last = weakref.ref(future)

        def join() -> Any:
            result, end = future.result()
            return self._joined(result, end, work)

        return Handle(name, join, finish, holds)

    def run(self, work: Callable[[], T]) -> T:
        """Run work when all that was started before is done or queued, and return what it returns."""
        last = self._last()
        if last is None or last.done():
            return work()  # at once: a thread would only cost time
        return self.start("", work).wait()

    def _on_stream(self, work: Callable[[], Any]) -> Callable[[], tuple[Any, torch.Event | None]]:
        """Work on the lane's stream, behind what the caller has queued by now; returns its end too."""
        stream = self._stream
        if stream is None:
            return lambda: (work(), None)
        ready = torch.accelerator.current_stream(self.device).record_event()

        def queue() -> tuple[Any, torch.Event]:
            with stream:
                stream.wait_event(ready)
                return work(), stream.record_event()

        return queue

    def _joined(self, result: Any, end: torch.Event | None, work: Callable) -> Any:
        """The result of work, once the caller's stream waits for it. What the work reads must live until then, whence
        the reference to it."""
        if end is not None:
            caller = torch.accelerator.current_stream(self.device)
            caller.wait_event(end)
            if self.staged:
                for tensor in _tensors(result):
                    tensor.record_stream(caller)
        return result


def _stream(device: torch.device) -> torch.Stream | None:
    able = devices.capabilities(device.type)
    if not able.is_asynchronous:
        return None
    return torch.Stream(device, priority=_HIGH) if able.has_stream_priorities else torch.Stream(device)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors on accelerators in nested tuples and lists."""
    if isinstance(value, torch.Tensor):
        if devices.capabilities(value.device.type).is_asynchronous:
            yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
