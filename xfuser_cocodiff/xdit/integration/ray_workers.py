"""Ranks of xDiT's Ray workers: no launcher sets RANK for them, so logs and records would take each for rank 0."""

import functools
import os
from collections.abc import Callable
from typing import Any

from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.settings.variables import RECORD_VARIABLE


def patches() -> list[Patch]:
    """Return the patch that sets RANK for the plugin, and for its records of stock."""
    return [
        Patch(
            "xfuser.ray.worker.worker_wrappers",
            "RayWorkerWrapper.__init__",
            "logs and records read RANK",
            _with_rank,
            ("self", "parallel_config", "worker_cls", "rank"),
        )
    ]


def _with_rank(original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(self: Any, parallel_config: Any, worker_cls: str, rank: int) -> None:
        if getattr(parallel_config.sp_config, "cocodiff", None) or os.environ.get(RECORD_VARIABLE):
            os.environ["RANK"] = str(rank)
        original(self, parallel_config, worker_cls, rank)

    return __init__
