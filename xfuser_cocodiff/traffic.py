"""Accounting: what moved along which axis, and how long it took."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Traffic:
    """Bytes that this rank sent and seconds it spent in collectives, per axis.

    Bytes are always counted: that is two additions. Seconds are taken only while `timed`; on an accelerator they come
    from events in the stream, which are read when asked for, so that timing adds no synchronisation to a step.
    """

    def __init__(self, timed: bool = False) -> None:
        self.timed = timed
        self.sent_bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._pending: list[tuple[str, torch.Event, torch.Event]] = []

    @contextmanager
    def collective(self, axis: str, size: int, buffer: torch.Tensor) -> Iterator[None]:
        """Count an all-to-all of `buffer` among `size` ranks, around the call and its wait."""
        self.sent_bytes[axis] += buffer.nbytes // size * (size - 1)
        self.calls[axis] += 1
        if not self.timed:
            yield
        elif buffer.device.type == "cpu":
            started = time.perf_counter()
            yield
            self._seconds[axis] += time.perf_counter() - started
        else:
            events = [torch.Event(buffer.device.type, enable_timing=True) for _ in range(2)]
            events[0].record()
            yield
            events[1].record()
            self._pending.append((axis, *events))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per axis so far; waits for collectives that are still under way."""
        for axis, start, end in self._pending:
            end.synchronize()
            self._seconds[axis] += start.elapsed_time(end) / 1000
        self._pending.clear()
        return dict(self._seconds)

    def reset(self) -> None:
        """Forget everything counted."""
        self.__init__(self.timed)
