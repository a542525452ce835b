"""The lane: where exchanges run one after the other while their caller computes, each behind a handle.

All ranks start the same exchanges in the same order, and a lane keeps that order whatever waits for what. So no rank
meets another in the wrong collective, and an exchange of several stages needs nobody to push it from one to the next.
"""

import contextlib
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


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

    def wait(self) -> T:
        """What the work returns, or the error that it raises.

        Raises:
            RuntimeError: it was waited for before.
        """
        if self._arrive is None:
            raise RuntimeError(f"{self.name} was waited for twice")
        arrive, self._arrive = self._arrive, None
        with self._holds():
            result = arrive()
        return self._finish(result) if self._finish else result

    def abandon(self) -> None:
        """Wait, if nobody did, and drop what came of it: for callers that an exception sends elsewhere."""
        if self._arrive is not None:
            arrive, self._arrive = self._arrive, None
            with contextlib.suppress(Exception):
                arrive()

    def __del__(self) -> None:
        if self._arrive is not None:
            warnings.warn(f"{self.name} was dropped without being waited for", ResourceWarning, stacklevel=2)


class Lane:
    """Runs work in the order in which it is handed in."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future | None = None

    def start(
        self,
        name: str,
        work: Callable[[], Any],
        finish: Callable[[Any], T] | None = None,
        holds: Callable[[], AbstractContextManager] = nullcontext,
    ) -> Handle[T]:
        """Run work behind the caller's back, under the caller's inference and gradient modes.

        Args:
            name: for messages.
            work: what to run.
            finish: what the caller runs on the result when it has waited.
            holds: context of its wait.
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "cocodiff")
        inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def run() -> Any:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                return work()

        self._last = self._executor.submit(run)
        return Handle(name, self._last.result, finish, holds)

    def run(self, work: Callable[[], T]) -> T:
        """Run work when all that was started before is done, and return what it returns."""
        if self._last is None or self._last.done():
            self._last = None
            return work()  # at once: a thread would only cost time
        return self.start("", work).wait()
