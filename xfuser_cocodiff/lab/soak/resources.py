"""Resources that a process holds: memory, threads, file descriptors and sockets, and how they change over time."""

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median

NAMES = ("resident_bytes", "allocated_bytes", "python_blocks", "threads", "descriptors", "sockets")
"""Resources of a sample. Resident memory includes what was freed; the bytes that `malloc` has given out, and Python's
blocks, do not."""


class _MallInfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns, over all arenas."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


@functools.cache
def _mallinfo() -> Callable[[], _MallInfo] | None:
    """Return glibc's `mallinfo2`; None with another C library."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function:
        function.restype = _MallInfo
    return function


def _allocated() -> dict[str, int]:
    """Return the bytes that `malloc` has given out by their name; nothing where they are unknown."""
    mallinfo = _mallinfo()
    if mallinfo is None:
        return {}
    info = mallinfo()
    return {"allocated_bytes": info.uordblks + info.hblkhd}


def sample() -> dict[str, int]:
    """Return what this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor that lists the folder
            targets.append(os.readlink(link))
    return {
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        **_allocated(),
        "python_blocks": sys.getallocatedblocks(),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(targets),
        "sockets": sum(target.startswith("socket:") for target in targets),
    }


def slope(values: Sequence[float]) -> float:
    """Return the least-squares slope of values, per sample; 0 for fewer than two."""
    if len(values) < 2:
        return 0.0
    center, mean = (len(values) - 1) / 2, fmean(values)
    spread = sum((number - center) ** 2 for number in range(len(values)))
    return sum((number - center) * (value - mean) for number, value in enumerate(values)) / spread


def summary(samples: Sequence[dict[str, int]], warm_up: int) -> dict[str, dict[str, float]]:
    """Return first and last level and slope per request of each resource, after the warm-up.

    Levels are medians of a tenth of the samples.
    """
    later = samples[warm_up:] if len(samples) > warm_up + 1 else samples
    tenth = max(1, len(later) // 10)
    found = {}
    for name in [each for each in NAMES if later and each in later[0]]:
        values = [each[name] for each in later]
        found[name] = {
            "first": median(values[:tenth]),
            "last": median(values[-tenth:]),
            "most": max(values),
            "slope": slope(values),
        }
    return found
