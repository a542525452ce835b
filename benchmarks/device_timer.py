"""Times calls on an accelerator: device time without waiting for the host, and host time."""

import math
import time
from collections.abc import Callable
from statistics import median

import torch

_FLUSHED_BYTES = 2**29
"""Bytes that are overwritten before each call: more than any cache holds (256 MB in an MI300X, by AMD's data sheet)."""
_CALLS = 10


class DeviceTimer:
    """Timer of calls on an accelerator. It flushes caches before each call, which it queues while the device is busy.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def host_seconds(self, call: Callable[[], object]) -> float:
        """Return the host time of a call, median of several; the device is idle when each begins."""
        call()
        seconds = []
        for _ in range(_CALLS):
            torch.accelerator.synchronize()
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
        return median(seconds)

    def device_seconds(self, call: Callable[[], object]) -> float:
        """Return the time of a call on the device, median of several."""
        flushes = 1 + math.ceil(2 * self.host_seconds(call) / self._seconds(self._flush))
        return self._seconds(call, flushes)

    def _seconds(self, call: Callable[[], object], flushes: int = 1) -> float:
        pairs = []
        for _ in range(_CALLS):
            for _ in range(flushes):  # they keep the device busy while the host queues the call
                self._flush()
            start, end = (torch.Event(self._device.type, enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.accelerator.synchronize()
        return median(start.elapsed_time(end) for start, end in pairs) / 1e3

    def _flush(self) -> None:
        self._buffer.zero_()
