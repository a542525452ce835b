"""Ray on a machine without an accelerator: xDiT's workers ask it for GPUs, and it has as many as it is told."""

import functools
import os
from collections.abc import Callable
from typing import Any

from xfuser_cocodiff.xdit.patching import symbol_lookup
from xfuser_cocodiff.xdit.patching.log import info_once
from xfuser_cocodiff.xdit.patching.patch import Patch

NUM_GPUS = 64
"""More than anyone starts workers on one machine."""
_ELSEWHERE = ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES")
"""Variables by which a cluster, or how many GPUs this one may have, is given."""


def patches() -> list[Patch]:
    """The row, where Ray is installed."""
    found = symbol_lookup.find_symbol("ray", "init") is not None
    return [Patch("ray", "init", "xDiT's workers ask for GPUs", _with_gpus)] if found else []


def _with_gpus(original: Callable) -> Callable:
    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        given = args or kwargs.get("address") or kwargs.get("num_gpus") is not None
        if given or any(name in os.environ for name in _ELSEWHERE):
            return original(*args, **kwargs)
        try:
            context = original(**{**kwargs, "num_gpus": NUM_GPUS})
        except ValueError:  # a cluster runs here already, which counts its own
            return original(**kwargs)
        info_once(f"Ray starts with {NUM_GPUS} virtual GPUs, which xDiT's workers request; they run on the CPU")
        return context

    return init
