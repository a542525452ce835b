"""Stages of plans: one collective, or direct sends, among the ranks that a rank meets in it.

In an all-to-all each of them gets another share of what a rank holds, in an all-gather all of it.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import default_pg_timeout

from xfuser_cocodiff.exchange import connections, roll_call
from xfuser_cocodiff.exchange.connections import Connections, Swap
from xfuser_cocodiff.exchange.traffic import Traffic
from xfuser_cocodiff.machine import device as devices
from xfuser_cocodiff.machine.device import CPU, is_captured
from xfuser_cocodiff.machine.plan import Plan, Stage
from xfuser_cocodiff.machine.topology import FLAT

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The name that PyTorch has for it."""
_TAG = 0
"""Of direct sends. All ranks start the stages of a group in the same order, and messages between two ranks keep theirs:
one tag serves all."""


class Room(NamedTuple):
    """Where the shares of a stage of direct sends arrive."""

    received: torch.Tensor
    receives: tuple[dist.Work, ...] = ()
    """Of each other rank, the one whose share comes last first: a thread that sleeps once for all is woken once. None
    where shares are short: these are read when they are waited for."""


class InFlight(NamedTuple):
    """A stage that has been started: its result is there after :meth:`Stages.finish`."""

    plan: Plan
    number: int
    """Which of the plan's stages."""
    sent: torch.Tensor
    """Kept until the stage is finished, since the network reads it."""
    received: torch.Tensor
    shape: tuple[int, ...]
    """Of what arrives, by source."""
    dim: int
    """To which the sources are moved."""
    works: tuple[dist.Work | Swap, ...] = ()
    """What to wait for; a functional collective is waited for through `received`."""
    began: torch.Event | None = None
    """When it might begin, where somebody wants to know."""


@dataclass(frozen=True)
class Peers:
    """The ranks of a group, as one of them turns to them: by their distance, so that not all turn to one first."""

    group: dist.ProcessGroup
    size: int
    here: int
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    connections: Connections | None
    """For short messages; where there are none, all go by the group."""

    @classmethod
    def of(cls, group: dist.ProcessGroup, connections: Connections | None = None) -> "Peers":
        """Those of a group."""
        size, here = group.size(), group.rank()
        away = range(1, size)
        return cls(
            group,
            size,
            here,
            tuple((here - distance) % size for distance in away),
            tuple((here + distance) % size for distance in away),
            connections,
        )

    def connections_for(self, share_bytes: int) -> Connections | None:
        """Those that a share of so many bytes goes by, if it does."""
        return self.connections if share_bytes <= connections.SHORT else None


@dataclass(frozen=True)
class Stages:
    """The stages that this rank can take part in."""

    groups: dict[Stage, dist.ProcessGroup]
    """For each stage the group of ranks that this rank meets in it."""
    device: torch.device = CPU
    """Where messages lie."""
    staged: bool = False
    """Whether they go through the host's memory, where they lie on an accelerator."""
    timeout: timedelta = default_pg_timeout
    """How long a direct send waits for its peer; the groups know it for their collectives."""
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    """Where all that moves is counted."""
    connections: Mapping[Stage, Connections] = field(default_factory=dict)
    """Of the groups whose ranks have some."""
    flat_name: str = FLAT
    """What the account calls all axes at once: the name of these where a larger topology has more."""

    # What small messages would ask for again and again, in every stage.

    @functools.cached_property
    def _peers(self) -> Mapping[Stage, Peers]:
        return {stage: Peers.of(group, self.connections.get(stage)) for stage, group in self.groups.items()}

    @functools.cached_property
    def _host_waits(self) -> bool:
        """Whether the host sees when a stage has ended."""
        return self.staged or not devices.of(self.device.type).queues

    def rooms(self, message: torch.Tensor, plan: Plan, gathers: bool = False) -> list[Room | None]:
        """Await what the stages of a plan are going to bring, before the first of them begins: shares that are awaited
        go at once, where their senders would have to ask first. Only direct sends have room of their own.

        Args:
            message: of this rank.
            plan: how it goes; its stages must begin in this order, and nothing else in their groups meanwhile.
            gathers: whether each stage brings all that its ranks hold, and not shares of it.
        """
        rooms: list[Room | None] = []
        awaits, count = not (torch.compiler.is_compiling() or self.staged), message.numel()
        for number, stage in enumerate(plan.stages):
            count *= self._peers[stage].size if gathers else 1
            room = self._room((count,), message, plan, number) if awaits and plan.direct[number] else None
            rooms.append(room)
        return rooms

    def start(self, buffer: torch.Tensor, plan: Plan, number: int, room: Room | None = None) -> InFlight:
        """Begin a stage with a buffer (*plan.shape, payload); with its room, where it is awaited already."""
        dim, stage = plan.dims[number], plan.stages[number]
        sent = (buffer.movedim(dim, 0) if dim else buffer).contiguous()
        if torch.compiler.is_compiling():  # a traced graph runs later: nothing to count then, and only collectives
            return InFlight(plan, number, sent, _functional(sent, self.groups[stage]), sent.shape, dim)
        return self._begun(sent, sent.shape, plan, number, dim, room)

    def start_gather(self, block: torch.Tensor, plan: Plan, number: int, room: Room | None = None) -> InFlight:
        """Begin a stage of an all-gather with what this rank holds; (ranks, *block.shape) arrives."""
        shape = self._peers[plan.stages[number]].size, *block.shape
        return self._begun(block.contiguous(), shape, plan, number, 0, room, gathers=True)

    def _begun(
        self,
        sent: torch.Tensor,
        shape: tuple[int, ...],
        plan: Plan,
        number: int,
        dim: int,
        room: Room | None,
        gathers: bool = False,
    ) -> InFlight:
        peers, label = self._peers[plan.stages[number]], self._label(plan, number)
        with self.traffic.time(label, sent.device), roll_call.naming_the_lost(peers.group, label):
            outgoing = _on_host(sent) if self.staged else sent
            share_bytes = outgoing.nbytes // (1 if gathers else peers.size)
            self.traffic.count_block(label, peers.size, share_bytes)
            began = self.traffic.begins(sent.device)
            if way := peers.connections_for(share_bytes):
                received = room.received if room else self._empty(shape, outgoing)
                works = (way.swap(outgoing, received, gathers),)
            elif plan.direct[number]:
                room = room or self._room(shape, outgoing, plan, number)
                received, works = room.received, _swap(outgoing, room, peers, gathers)
            else:
                begin = _gather if gathers else _collective
                received, works = begin(outgoing, self._empty(shape, outgoing), peers.group)
            return InFlight(plan, number, outgoing, received, shape, dim, works, began)

    def _room(self, shape: tuple[int, ...], like: torch.Tensor, plan: Plan, number: int) -> Room:
        """Room for a stage, with all receives posted."""
        peers = self._peers[plan.stages[number]]
        with roll_call.naming_the_lost(peers.group, self._label(plan, number)):
            received = self._empty(shape, like)
            if peers.connections_for(received.nbytes // peers.size):
                return Room(received)
            places = received.view(peers.size, -1).unbind()
            receives = [peers.group.recv([places[rank]], rank, _TAG) for rank in peers.sources]
            return Room(received, tuple(receives[::-1]))

    def _empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        pins = self.staged and devices.of(self.device.type).queues
        return torch.empty(shape, dtype=like.dtype, device=like.device, pin_memory=pins)

    def _label(self, plan: Plan, number: int) -> str:
        return self.flat_name if plan.labels[number] == FLAT else plan.labels[number]

    def finish(self, flight: InFlight) -> torch.Tensor:
        """Wait for a stage and return what arrived, indexed by source."""
        plan, number, received = flight.plan, flight.number, flight.received
        if torch.compiler.is_compiling():
            received = _wait(received)
        else:
            label, group = self._label(plan, number), self.groups[plan.stages[number]]
            with self.traffic.time(label, flight.sent.device), roll_call.naming_the_lost(group, label):
                # On a device a timeout that is passed here would hold up the host, and a collective has its group's.
                # The host waits for gloo's anyway, which do not go by that with PyTorch 2.8.
                is_told = plan.direct[number] or self._host_waits
                for work in flight.works:
                    work.wait(self.timeout) if is_told else work.wait()
                received = _wait(received)
            if self.staged:
                received = received.to(self.device, non_blocking=True)
            self.traffic.ends(label, flight.began)
            if not self._host_waits and roll_call.is_attended():
                self._watch(label, group)
        received = received.view(flight.shape)
        return received.movedim(0, flight.dim) if flight.dim else received

    def _watch(self, label: str, group: dist.ProcessGroup) -> None:
        """Have somebody see that a stage comes to its end for which the host does not wait: else the backend would end
        the process without naming who is missing."""
        if not is_captured(self.device):
            ended = torch.Event(self.device.type)  # which holds nothing, where the collective's work holds its tensors
            ended.record()
            roll_call.expect(ended.query, group, label, self.timeout.total_seconds())


def _collective(
    sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, tuple[dist.Work, ...]]:
    if devices.of(sent.device.type).functional_only:
        return _functional(sent, group), ()
    return received, (dist.all_to_all_single(received, sent, group=group, async_op=True),)


def _gather(
    sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, tuple[dist.Work, ...]]:
    if devices.of(sent.device.type).functional_only:
        return functional.all_gather_tensor(sent.flatten(), 0, group), ()
    return received, (_all_gather(received.view(-1), sent.view(-1), group=group, async_op=True),)


def _on_host(sent: torch.Tensor) -> torch.Tensor:
    """A copy in memory of the host that the device reads and writes by itself, once it is there."""
    if not devices.of(sent.device.type).queues:
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


def _swap(sent: torch.Tensor, room: Room, peers: Peers, gives_all: bool) -> tuple[dist.Work, ...]:
    """Send to every rank of a group its share, or all, once its own receives are posted (see :mod:`plan`); returns what
    to wait for."""
    shares = [sent.view(-1)] * peers.size if gives_all else sent.view(peers.size, -1).unbind()
    sends = [peers.group.send([shares[rank]], rank, _TAG) for rank in peers.destinations]
    room.received.view(peers.size, -1)[peers.here].copy_(shares[peers.here])
    return (*room.receives, *sends)
