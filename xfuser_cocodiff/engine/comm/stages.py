"""Execution of a plan's stages: one collective each, among the ranks of the stage.

In an all-to-all each of these ranks receives another block of a rank's buffer, in an all-gather all of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from xfuser_cocodiff.engine.comm import failure_detection
from xfuser_cocodiff.engine.comm.traffic import Traffic
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.engine.topology.devices import CPU
from xfuser_cocodiff.engine.topology.plans import Plan, Stage
from xfuser_cocodiff.engine.topology.topology import FLAT

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gather into one tensor, under the name that this PyTorch has for it."""
_functional_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
"""The same as a functional collective."""

PendingStage = Callable[[], torch.Tensor]
"""A started stage: waits for its end and returns what was received, indexed by source."""


@dataclass(frozen=True)
class Stages:
    """The stages that this rank takes part in, and their process groups."""

    groups: dict[Stage, dist.ProcessGroup]
    """Process group of each stage: the ranks that exchange messages in it."""
    device: torch.device = CPU
    """Device of the messages."""
    staged: bool = False
    """Whether messages on an accelerator go through host memory."""
    timeout: timedelta | None = None
    """Timeout of a stage, as set in its group; None stands for the backend's default."""
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    """Statistics of all messages."""
    flat_name: str = FLAT
    """Name of a stage over all axes in the statistics: of these axes, where the mesh is part of a larger one."""

    def start(self, buffer: torch.Tensor, plan: Plan, number: int) -> PendingStage:
        """Start a stage of an all-to-all.

        Args:
            buffer: shape (*plan.shape, payload).
            plan: plan of the all-to-all.
            number: index of the stage in the plan.
        """
        dim = plan.dims[number]
        sent = (buffer.movedim(dim, 0) if dim else buffer).contiguous()
        if torch.compiler.is_compiling():  # traced graphs run later and contain collectives only: no statistics
            received = _traceable_all_to_all(sent, self.groups[plan.stages[number]])
            return lambda: _wait(received).view(sent.shape).movedim(0, dim)
        wait = self._start(sent, sent.shape, plan, number)
        return (lambda: wait().movedim(0, dim)) if dim else wait

    def start_gather(self, block: torch.Tensor, plan: Plan, number: int) -> PendingStage:
        """Start a stage of an all-gather of `block`; it returns shape (ranks, *block.shape)."""
        shape = self.groups[plan.stages[number]].size(), *block.shape
        return self._start(block.contiguous(), shape, plan, number, gathers=True)

    def _start(
        self, sent: torch.Tensor, shape: tuple[int, ...], plan: Plan, number: int, gathers: bool = False
    ) -> PendingStage:
        group = self.groups[plan.stages[number]]
        label = self.flat_name if plan.labels[number] == FLAT else plan.labels[number]
        with self.traffic.time_stage(label, sent.device), failure_detection.report_failed_ranks(group, label):
            outgoing = _to_host(sent) if self.staged else sent
            self.traffic.count_bytes(label, shape[0], outgoing.nbytes // (1 if gathers else shape[0]))
            if devices.capabilities(outgoing.device.type).functional_only:
                received, works = _run_functional(outgoing, group, gathers)
            else:
                received, works = _run_collective(outgoing, self._empty(shape, outgoing), group, gathers)

        def wait() -> torch.Tensor:
            with self.traffic.time_stage(label, sent.device), failure_detection.report_failed_ranks(group, label):
                for work in works:  # without a timeout: one given here would block the host of an accelerator
                    work.wait()
                arrived = _wait(received)
            if self.staged:
                arrived = arrived.to(self.device, non_blocking=True)
            return arrived.view(shape)

        return wait

    def _empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        is_pinned = self.staged and devices.capabilities(self.device.type).is_asynchronous
        return torch.empty(shape, dtype=like.dtype, device=like.device, pin_memory=is_pinned)


_Started = tuple[torch.Tensor, tuple[dist.Work, ...]]
"""The receive buffer of a stage, and the work to wait for."""


def _run_functional(sent: torch.Tensor, group: dist.ProcessGroup, gathers: bool) -> _Started:
    """Start a functional collective, which allocates its receive buffer."""
    if gathers:
        return _functional_all_gather(sent.flatten(), 0, group), ()
    return _traceable_all_to_all(sent, group), ()


def _run_collective(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup, gathers: bool) -> _Started:
    if gathers:
        return received, (_all_gather(received.view(-1), sent.view(-1), group=group, async_op=True),)
    return received, (dist.all_to_all_single(received, sent, group=group, async_op=True),)


def _to_host(sent: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned host memory, after the copy has completed."""
    if not devices.capabilities(sent.device.type).is_asynchronous:
        return sent.clone()
    copy = torch.empty(sent.shape, dtype=sent.dtype, pin_memory=True)
    copy.copy_(sent, non_blocking=True)
    torch.accelerator.current_stream(sent.device).synchronize()
    return copy


def _traceable_all_to_all(sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Start the collective that torch.compile can trace; in eager code it costs ten times as much host time."""
    return functional.all_to_all_single(sent.flatten(), None, None, group)


def _wait(received: torch.Tensor) -> torch.Tensor:
    return received.wait() if isinstance(received, functional.AsyncCollectiveTensor) else received
