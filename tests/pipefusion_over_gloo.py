"""Patches with which PipeFusion's stages communicate over gloo, as patch 0006 of patches/ has them run.

gloo's sends differ from NCCL's: a send that nothing references is dropped, and waiting for one waits until it is
received.
"""

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from xfuser_cocodiff.xdit.patching.patch import Patch

_MODULE, _STAGES = "xfuser.core.distributed.group_coordinator", "PipelineGroupCoordinator"
_MAX_IN_FLIGHT = 64
"""Maximum number of sends in flight, more than a stage needs to be ahead of the next one."""


def patches() -> list[Patch]:
    """Return the patches with which the stages of a pipeline communicate over gloo."""
    in_flight = _SendsInFlight()
    send = functools.partial(_holding_sends, in_flight), ("self", "tensor")
    communicate_shapes = (
        functools.partial(_sending_shapes_first, in_flight),
        ("self", "tensor_send_to_next", "recv_prev"),
    )
    methods = {"_pipeline_isend": send, "_pipeline_isend_skip": send, "_communicate_shapes": communicate_shapes}
    why = "waits for sends as if it were NCCL, and does not hold them"
    return [
        Patch(_MODULE, f"{_STAGES}.{name}", why, replace, parameters) for name, (replace, parameters) in methods.items()
    ]


class _Send:
    """A send that holds its tensor, and may be waited for more than once: gloo would wait for the next send then."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self._work: dist.Work | None = work
        self._tensor: torch.Tensor | None = tensor

    def wait(self) -> None:
        """Wait until the message is received."""
        if self._work is not None:
            self._work.wait()
            self._work = self._tensor = None


class _SendsInFlight:
    """The last sends, which would be dropped without a reference."""

    def __init__(self) -> None:
        self._sends: deque[_Send] = deque()

    def add(self, work: dist.Work, tensor: torch.Tensor) -> _Send:
        """Hold a send, and wait for the oldest one if there are too many."""
        self._sends.append(_Send(work, tensor))
        if len(self._sends) > _MAX_IN_FLIGHT:
            self._sends.popleft().wait()
        return self._sends[-1]


def _holding_sends(in_flight: _SendsInFlight, send: Callable) -> Callable:
    """Return a send that holds its tensor."""

    @functools.wraps(send)
    def held_send(self: Any, tensor: torch.Tensor) -> Any:
        work = send(self, tensor)
        return in_flight.add(work, tensor) if _is_gloo(self) else work

    return held_send


def _sending_shapes_first(in_flight: _SendsInFlight, communicate: Callable) -> Callable:
    """Return a function that communicates shapes without waiting for its sends: both stages of a pair may send before
    either receives."""

    @functools.wraps(communicate)
    def _communicate_shapes(
        self: Any, tensor_send_to_next: torch.Tensor | None = None, recv_prev: bool = False
    ) -> torch.Size:
        if not _is_gloo(self):
            return communicate(self, tensor_send_to_next, recv_prev)
        if tensor_send_to_next is not None:
            for numbers in ([tensor_send_to_next.ndim], [*tensor_send_to_next.shape]):
                message = torch.tensor(numbers)
                in_flight.add(dist.isend(message, self.next_rank, self.device_group), message)
        length, shape = torch.ones(1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        if recv_prev:
            dist.recv(length, self.prev_rank, self.device_group)
            shape = torch.zeros(int(length), dtype=torch.int64)
            dist.recv(shape, self.prev_rank, self.device_group)
        return torch.Size(shape)

    return _communicate_shapes


def _is_gloo(stages: Any) -> bool:
    return dist.get_backend(stages.device_group) == dist.Backend.GLOO
