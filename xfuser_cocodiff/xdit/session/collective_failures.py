"""Failure detection in xDiT's own collectives: while the plugin is in use, they name unresponsive ranks too."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from xfuser_cocodiff.engine.comm import failure_detection
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.session import usp_versions

_COORDINATOR = "xfuser.core.distributed.group_coordinator"
_METHODS = (
    *("all_reduce", "all_gather", "gather", "broadcast", "broadcast_object", "broadcast_object_list", "send_object"),
    *("recv_object", "broadcast_tensor_dict", "send_tensor_dict", "recv_tensor_dict", "barrier", "send", "recv"),
)


def patches() -> list[Patch]:
    """Return the patches of all collectives."""
    why = "unresponsive ranks are named"
    all_to_all = Patch(usp_versions.MODULE, "_sdpa_all_to_all_single", why, _with_detection_in_all_to_all, ("x",))
    return [
        *(Patch(_COORDINATOR, f"GroupCoordinator.{name}", why, _with_detection) for name in _METHODS),
        *([] if all_to_all.problem() else [all_to_all]),
    ]


def _is_detecting() -> bool:
    # In this order: a traced graph must not depend on whether detection is on.
    return not torch.compiler.is_compiling() and failure_detection.is_heartbeat_running()


def _with_detection(original: Callable) -> Callable:
    @functools.wraps(original)
    def communicate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_detecting():
            return original(self, *args, **kwargs)
        with failure_detection.report_failed_ranks(self.ranks, f"xDiT's {original.__name__}"):
            return original(self, *args, **kwargs)

    return communicate


def _with_detection_in_all_to_all(original: Callable) -> Callable:
    @functools.wraps(original)
    def _sdpa_all_to_all_single(x: torch.Tensor) -> torch.Tensor:
        if not _is_detecting():
            return original(x)
        from yunchang.globals import PROCESS_GROUP

        with failure_detection.report_failed_ranks(PROCESS_GROUP.ULYSSES_PG, "xDiT's all-to-all"):
            return original(x)

    return _sdpa_all_to_all_single
