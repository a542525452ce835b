"""Stand-ins for the parts of torch.cuda that xDiT uses to time and measure, on a machine without an accelerator."""

import contextlib
import resource
import sys
import time
from pathlib import Path
from typing import Any


class HostEvent:
    """torch.cuda.Event on the host's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time: float | None = None

    def record(self, *_: Any) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Work on the host is done when the call returns."""

    def query(self) -> bool:
        return True

    def wait(self, *_: Any) -> None:
        """No stream to hold up."""

    def elapsed_time(self, end: "HostEvent") -> float:
        """Milliseconds from this event to `end`."""
        return (end._time - self._time) * 1000


def peak_memory() -> int:
    """Largest resident size of this process in bytes since the last reset."""
    status = _linux_status()
    if "VmHWM" in status:
        return status["VmHWM"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory() -> int:
    """Resident size of this process in bytes."""
    return _linux_status().get("VmRSS", 0)


def reset_peak_memory() -> None:
    """Start a new peak, where the kernel allows it."""
    with contextlib.suppress(OSError):  # elsewhere the peak counts from the start of the process
        Path("/proc/self/clear_refs").write_text("5")


def _linux_status() -> dict[str, int]:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if line.endswith("kB"))
    return {key: int(value.split()[0]) * 1024 for key, value in pairs}
