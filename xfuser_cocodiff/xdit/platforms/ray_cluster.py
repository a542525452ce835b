"""Ray on a machine without an accelerator: it starts with virtual GPUs, which xDiT's workers request."""

import functools
import os
from collections.abc import Callable
from typing import Any

from xfuser_cocodiff.xdit.patching import symbol_lookup
from xfuser_cocodiff.xdit.patching.log import info_once
from xfuser_cocodiff.xdit.patching.patch import Patch

NUM_GPUS = 64
"""Number of virtual GPUs; more than the workers of one machine."""
_GIVEN_BY = ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES")
"""Environment variables that name a cluster, or the GPUs that it may use."""


def patches() -> list[Patch]:
    """Return the patch of `ray.init`, if Ray is installed."""
    is_installed = symbol_lookup.find_symbol("ray", "init") is not None
    return [Patch("ray", "init", "xDiT's workers ask for GPUs", _with_gpus)] if is_installed else []


def _with_gpus(original: Callable) -> Callable:
    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        given = args or kwargs.get("address") or kwargs.get("num_gpus") is not None
        if given or any(name in os.environ for name in _GIVEN_BY):
            return original(*args, **kwargs)
        try:
            context = original(**{**kwargs, "num_gpus": NUM_GPUS})
        except ValueError:  # a running cluster has its own number of GPUs
            return original(**kwargs)
        info_once(f"Ray starts with {NUM_GPUS} virtual GPUs, which xDiT's workers request; they run on the CPU")
        return context

    return init
