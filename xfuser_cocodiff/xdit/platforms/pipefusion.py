"""PipeFusion over gloo, whose sends are not like a GPU's: one that nobody holds is forgotten, and to wait for one is to
wait until its receiver asks for it."""

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from xfuser_cocodiff.xdit.patching.patch import Patch

_MODULE, _STAGES = "xfuser.core.distributed.group_coordinator", "PipelineGroupCoordinator"
_XDITS_OWN = (_MODULE, f"{_STAGES}._communicate_shapes_over_gloo")
"""What an xDiT has whose stages meet over gloo of themselves: the series in patches/ brings it."""
_MOST_UNDER_WAY = 64
"""Sends that nobody waits for: more than stages are ahead of each other."""


def patches() -> list[Patch]:
    """Rows that let stages of a pipeline meet over gloo."""
    under_way: deque[_Sending] = deque()

    def hold(work: dist.Work, tensor: torch.Tensor) -> "_Sending":
        under_way.append(_Sending(work, tensor))
        if len(under_way) > _MOST_UNDER_WAY:
            under_way.popleft().wait()
        return under_way[-1]

    def held(send: Callable) -> Callable:
        @functools.wraps(send)
        def sending(self: Any, tensor: torch.Tensor) -> Any:
            work = send(self, tensor)
            return hold(work, tensor) if _is_gloo(self) else work

        return sending

    def sending_ahead(communicate: Callable) -> Callable:
        """Both stages of a pair may have a shape to send before either asks for one."""

        @functools.wraps(communicate)
        def _communicate_shapes(
            self: Any, tensor_send_to_next: torch.Tensor | None = None, recv_prev: bool = False
        ) -> torch.Size:
            if not _is_gloo(self):
                return communicate(self, tensor_send_to_next, recv_prev)
            if tensor_send_to_next is not None:
                for told in ([tensor_send_to_next.ndim], [*tensor_send_to_next.shape]):
                    message = torch.tensor(told)
                    hold(dist.isend(message, self.next_rank, self.device_group), message)
            length, shape = torch.ones(1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
            if recv_prev:
                dist.recv(length, self.prev_rank, self.device_group)
                shape = torch.zeros(int(length), dtype=torch.int64)
                dist.recv(shape, self.prev_rank, self.device_group)
            return torch.Size(shape)

        return _communicate_shapes

    why = "waits for sends as if it were NCCL, and does not hold them"
    rows = {
        "_pipeline_isend": (held, ("self", "tensor")),
        "_pipeline_isend_skip": (held, ("self", "tensor")),
        "_communicate_shapes": (sending_ahead, ("self", "tensor_send_to_next", "recv_prev")),
    }
    return [
        Patch(_MODULE, f"{_STAGES}.{name}", why, replace, parameters, unless_present=_XDITS_OWN)
        for name, (replace, parameters) in rows.items()
    ]


class _Sending:
    """A send and what it sends, to be waited for as often as anybody likes; gloo would wait for another one."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self._work: dist.Work | None = work
        self._tensor: torch.Tensor | None = tensor

    def wait(self) -> None:
        """Wait until it is received."""
        if self._work is not None:
            self._work.wait()
            self._work = self._tensor = None


def _is_gloo(stages: Any) -> bool:
    return dist.get_backend(stages.device_group) == dist.Backend.GLOO
