"""Replacements of torch.cuda's timers and memory statistics, on a machine without an accelerator."""

import contextlib
import resource
import sys
import time
from pathlib import Path
from typing import Any


class HostEvent:
    """A torch.cuda.Event on the clock of the host."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time: float | None = None

    def record(self, *_: Any) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once: work on the host is synchronous."""

    def query(self) -> bool:
        return True

    def wait(self, *_: Any) -> None:
        """Return at once: the host has no streams."""

    def elapsed_time(self, end: "HostEvent") -> float:
        """Return the time from this event to `end`, in milliseconds."""
        return (end._time - self._time) * 1000


def peak_memory() -> int:
    """Return the largest resident size of this process since the last reset, in bytes."""
    status = _linux_status()
    if "VmHWM" in status:
        return status["VmHWM"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory() -> int:
    """Return the resident size of this process, in bytes."""
    return _linux_status().get("VmRSS", 0)


def reset_peak_memory() -> None:
    """Reset the peak, where the operating system supports it."""
    with contextlib.suppress(OSError):  # otherwise the peak is that since the process started
        Path("/proc/self/clear_refs").write_text("5")


def _linux_status() -> dict[str, int]:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if line.endswith("kB"))
    return {key: int(value.split()[0]) * 1024 for key, value in pairs}
