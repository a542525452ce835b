"""Stages of plans: one collective, or direct sends, among the ranks that a rank meets in it.

In an all-to-all each of them gets another share of what a rank holds, in an all-gather all of it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import default_pg_nccl_timeout, default_pg_timeout

from xfuser_cocodiff.engine.comm import failure_detection
from xfuser_cocodiff.engine.comm.traffic import Traffic
from xfuser_cocodiff.engine.topology import devices as devices
from xfuser_cocodiff.engine.topology.devices import CPU, is_captured
from xfuser_cocodiff.engine.topology.plans import Plan, Stage
from xfuser_cocodiff.engine.topology.topology import FLAT

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The name that PyTorch has for it."""
_TAG = 0
"""Of direct sends. All ranks start the stages of a group in the same order, a stage posts its receives when it starts,
and messages between two ranks keep their order: one tag serves all."""


PendingStage = Callable[[], torch.Tensor]
"""A stage that has been started: waits for it, and returns what arrived, indexed by source."""


@dataclass(frozen=True)
class Stages:
    """The stages that this rank can take part in."""

    groups: dict[Stage, dist.ProcessGroup]
    """For each stage the group of ranks that this rank meets in it."""
    device: torch.device = CPU
    """Where messages lie."""
    staged: bool = False
    """Whether they go through the host's memory, where they lie on an accelerator."""
    timeout: timedelta | None = None
    """How long a stage may take, as the groups know it; None where they have the backend's default."""
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    """Where all that moves is counted."""
    flat_name: str = FLAT
    """What the account calls all axes at once: the name of these where a larger topology has more."""

    @functools.cached_property
    def _host_waits(self) -> bool:
        """Whether the host sees when a stage has ended."""
        return self.staged or not devices.capabilities(self.device.type).is_asynchronous

    def start(self, buffer: torch.Tensor, plan: Plan, number: int) -> PendingStage:
        """Begin a stage with a buffer (*plan.shape, payload)."""
        dim = plan.dims[number]
        sent = (buffer.movedim(dim, 0) if dim else buffer).contiguous()
        if torch.compiler.is_compiling():  # a traced graph runs later: nothing to count then, and only collectives
            received = _functional(sent, self.groups[plan.stages[number]])
            return lambda: _wait(received).view(sent.shape).movedim(0, dim)
        arrive = self._begun(sent, sent.shape, plan, number)
        return (lambda: arrive().movedim(0, dim)) if dim else arrive

    def start_gather(self, block: torch.Tensor, plan: Plan, number: int) -> PendingStage:
        """Begin a stage of an all-gather with what this rank holds; (ranks, *block.shape) arrives."""
        shape = self.groups[plan.stages[number]].size(), *block.shape
        return self._begun(block.contiguous(), shape, plan, number, gathers=True)

    def _begun(
        self, sent: torch.Tensor, shape: tuple[int, ...], plan: Plan, number: int, gathers: bool = False
    ) -> PendingStage:
        group = self.groups[plan.stages[number]]
        label = self.flat_name if plan.labels[number] == FLAT else plan.labels[number]
        with self.traffic.time_stage(label, sent.device), failure_detection.report_failed_ranks(group, label):
            outgoing = _on_host(sent) if self.staged else sent
            self.traffic.count_bytes(label, shape[0], outgoing.nbytes // (1 if gathers else shape[0]))
            began = self.traffic.record_start(sent.device)
            begin = _swap if plan.direct[number] else _collective
            received, works = begin(outgoing, self._empty(shape, outgoing), group, gathers)

        def wait() -> torch.Tensor:
            with self.traffic.time_stage(label, outgoing.device), failure_detection.report_failed_ranks(group, label):
                for work in works:  # as long as its group's timeout; on a device, one given here stops the host
                    work.wait()
                arrived = _wait(received)
            if self.staged:
                arrived = arrived.to(self.device, non_blocking=True)
            self.traffic.record_end(label, began)
            if not self._host_waits and failure_detection.is_heartbeat_running():
                self._watch(label, group)
            return arrived.view(shape)

        return wait

    def _empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        pins = self.staged and devices.capabilities(self.device.type).is_asynchronous
        return torch.empty(shape, dtype=like.dtype, device=like.device, pin_memory=pins)

    def _watch(self, label: str, group: dist.ProcessGroup) -> None:
        """Have somebody see that a stage comes to its end for which the host does not wait: else the backend would end
        the process without naming who is missing."""
        if not is_captured(self.device):
            ended = torch.Event(self.device.type)  # which holds nothing, where the collective's work holds its tensors
            ended.record()
            timeout = self.timeout or (self.device.type == "cuda" and default_pg_nccl_timeout) or default_pg_timeout
            failure_detection.set_deadline(ended.query, group, label, timeout.total_seconds())


_Begun = tuple[torch.Tensor, tuple[dist.Work, ...]]
"""Where what a stage brings arrives, and what to wait for."""


def _collective(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup, gathers: bool) -> _Begun:
    if devices.capabilities(sent.device.type).functional_only:
        return functional.all_gather_tensor(sent.flatten(), 0, group) if gathers else _functional(sent, group), ()
    if gathers:
        return received, (_all_gather(received.view(-1), sent.view(-1), group=group, async_op=True),)
    return received, (dist.all_to_all_single(received, sent, group=group, async_op=True),)


def _on_host(sent: torch.Tensor) -> torch.Tensor:
    """A copy in memory of the host that the device reads and writes by itself, once it is there."""
    if not devices.capabilities(sent.device.type).is_asynchronous:
        return sent.clone()
    copy = torch.empty(sent.shape, dtype=sent.dtype, pin_memory=True)
    copy.copy_(sent, non_blocking=True)
    torch.accelerator.current_stream(sent.device).synchronize()
    return copy


def _functional(sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The collective that torch.compile can trace; outside of it a call costs ten times as much from Python."""
    return functional.all_to_all_single(sent.flatten(), None, None, group)


def _wait(received: torch.Tensor) -> torch.Tensor:
    return received.wait() if isinstance(received, functional.AsyncCollectiveTensor) else received


def _swap(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup, gathers: bool) -> _Begun:
    """Send to every rank of a group its share, or all, once the receives are posted (see :mod:`plan`)."""
    size, here = group.size(), group.rank()
    places = received.view(size, -1).unbind()
    shares = [sent.view(-1)] * size if gathers else sent.view(size, -1).unbind()
    # By their distance, so that not all turn to one first.
    receives = [group.recv([places[rank]], rank, _TAG) for rank in ((here - away) % size for away in range(1, size))]
    sends = [group.send([shares[rank]], rank, _TAG) for rank in ((here + away) % size for away in range(1, size))]
    places[here].copy_(shares[here])
    # The share that comes last is waited for first: a thread that sleeps once for all is woken once.
    return received, (*receives[::-1], *sends)
