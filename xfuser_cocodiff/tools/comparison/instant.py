"""Instants of a device's work: start and end of what is timed."""

import time
from typing import TypeAlias

import torch

from xfuser_cocodiff.engine.topology import devices

Instant: TypeAlias = float | torch.Event
"""An instant: of the host's clock, or in the stream of an accelerator, so that the host need not wait for it."""


def now(device: torch.device) -> Instant:
    """Return the instant at which all work submitted to a device's current stream so far is done."""
    if not devices.capabilities(device.type).is_asynchronous:
        return time.perf_counter()
    event = torch.Event(device.type, enable_timing=True)
    event.record()
    return event


def seconds_between(began: Instant, ended: Instant) -> float:
    """Return the seconds between two instants of one device; waits for the later one."""
    if isinstance(began, float) or isinstance(ended, float):
        return ended - began
    ended.synchronize()
    return began.elapsed_time(ended) / 1000
