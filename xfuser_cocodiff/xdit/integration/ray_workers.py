"""xDiT's Ray workers, which no launcher tells who they are: what goes by RANK would take all of them for the first."""

import functools
import os
from collections.abc import Callable
from typing import Any

from xfuser_cocodiff.xdit.patching.patch import Patch


def patches() -> list[Patch]:
    """The row that tells them."""
    return [
        Patch(
            "xfuser.ray.worker.worker_wrappers",
            "RayWorkerWrapper.__init__",
            "logs and records go by RANK",
            _telling,
            ("self", "parallel_config", "worker_cls", "rank"),
        )
    ]


def _telling(original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(self: Any, parallel_config: Any, worker_cls: str, rank: int) -> None:
        os.environ["RANK"] = str(rank)
        original(self, parallel_config, worker_cls, rank)

    return __init__
