"""Resources that a process holds: memory, threads, file descriptors and sockets, and how they change over time."""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

NAMES = ("resident_bytes", "python_blocks", "threads", "descriptors", "sockets")
"""Resources of a sample. Resident memory includes what was freed; Python's blocks do not."""


def sample() -> dict[str, int]:
    """Return what this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor that lists the folder
            targets.append(os.readlink(link))
    return {
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
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
    for name in NAMES if later else ():
        values = [each[name] for each in later]
        found[name] = {
            "first": median(values[:tenth]),
            "last": median(values[-tenth:]),
            "most": max(values),
            "slope": slope(values),
        }
    return found
