"""xDiT's own collectives, in which a rank may be lost as well as in the plugin's: where the plugin is in use, the
others name it there too."""

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
    """Rows for what communicates."""
    why = "a rank that is lost there is named"
    stocks = Patch(usp_versions.MODULE, "_sdpa_all_to_all_single", why, _among_ulysses_ranks, ("x",))
    return [
        *(Patch(_COORDINATOR, f"GroupCoordinator.{name}", why, _in_a_group) for name in _METHODS),
        *([] if stocks.problem() else [stocks]),
    ]


def _is_named() -> bool:
    # Asked in this order: what is traced must not depend on who listens.
    return not torch.compiler.is_compiling() and failure_detection.is_heartbeat_running()


def _in_a_group(original: Callable) -> Callable:
    @functools.wraps(original)
    def communicate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_named():
            return original(self, *args, **kwargs)
        with failure_detection.report_failed_ranks(self.ranks, f"xDiT's {original.__name__}"):
            return original(self, *args, **kwargs)

    return communicate


def _among_ulysses_ranks(original: Callable) -> Callable:
    @functools.wraps(original)
    def _sdpa_all_to_all_single(x: torch.Tensor) -> torch.Tensor:
        if not _is_named():
            return original(x)
        from yunchang.globals import PROCESS_GROUP

        with failure_detection.report_failed_ranks(PROCESS_GROUP.ULYSSES_PG, "xDiT's all-to-all"):
            return original(x)

    return _sdpa_all_to_all_single
