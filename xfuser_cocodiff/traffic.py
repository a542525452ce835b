"""Accounting: what moved along which axes, and how long it took."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_UNTIMED = nullcontext()


class Traffic:
    """Bytes that this rank sent and seconds it spent in collectives, per stage: an axis, several merged ones, or flat.

    Bytes are always counted: that is two additions. Seconds are taken only while `timed`; on an accelerator they come
    from events in the stream, which are read when asked for, so that timing adds no synchronisation to a step.
    """

    def __init__(self, timed: bool = False) -> None:
        self.timed = timed
        self.sent_bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._pending: list[tuple[str, torch.Event, torch.Event]] = []

    def count(self, stage: str, ranks: int, buffer: torch.Tensor) -> None:
        """Count an all-to-all of `buffer` among so many ranks."""
        self.sent_bytes[stage] += buffer.nbytes // ranks * (ranks - 1)
        self.calls[stage] += 1

    def time(self, stage: str, device: torch.device) -> AbstractContextManager[None]:
        """Take the time that a collective holds the caller up, around its start and around its wait."""
        return self._time(stage, device) if self.timed else _UNTIMED

    @contextmanager
    def _time(self, stage: str, device: torch.device) -> Iterator[None]:
        if device.type == "cpu":
            started = time.perf_counter()
            yield
            self._seconds[stage] += time.perf_counter() - started
        else:
            events = [torch.Event(device.type, enable_timing=True) for _ in range(2)]
            events[0].record()
            yield
            events[1].record()
            self._pending.append((stage, *events))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per stage so far; waits for collectives that are still under way."""
        for stage, start, end in self._pending:
            end.synchronize()
            self._seconds[stage] += start.elapsed_time(end) / 1000
        self._pending.clear()
        return dict(self._seconds)

    def reset(self) -> None:
        """Forget everything counted."""
        self.__init__(self.timed)
