"""What the plugin's entry point adds to ``import torch``."""

import subprocess
import sys
from statistics import median
from typing import Any

from xfuser_cocodiff.reporting import host

_MEASURE = """
import importlib.metadata, os, time
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
entries = importlib.metadata.entry_points(group="torch.backends")
entry = next(entry for entry in entries if entry.name == "cocodiff")
started = time.perf_counter()
entry.load()()
print(time.perf_counter() - started)
"""


def measure(repeats: int) -> dict[str, Any]:
    """Load and call the entry point in `repeats` fresh interpreters.

    PyTorch looks up the entry points of the group in any case, so that is not counted; importing our module and calling
    it is.

    Returns:
        The record: `seconds` of each repeat and their median.
    """
    seconds = [float(_fresh(_MEASURE)) for _ in range(repeats)]
    return {**host.header(), "seconds": seconds, "median_seconds": median(seconds)}


def _fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
