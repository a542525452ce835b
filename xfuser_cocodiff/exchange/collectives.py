"""Topology bound to process groups: the all-to-all along the axes of a machine (TAPA), by any plan.

One collective per stage, each along its own dim of the buffer seen as (*plan.shape, payload), equals the flat one bit
for bit in any order of the stages.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import default_pg_timeout

from xfuser_cocodiff.exchange import roll_call
from xfuser_cocodiff.exchange.lane import Handle, Lane
from xfuser_cocodiff.exchange.traffic import Label, Span, Traffic
from xfuser_cocodiff.machine import device as devices
from xfuser_cocodiff.machine.device import CPU, is_captured
from xfuser_cocodiff.machine.plan import Plan, Stage, candidates
from xfuser_cocodiff.machine.topology import FLAT, Topology

_TAG = 0
"""Of direct sends. All ranks start the stages of a group in the same order, and messages between two ranks keep theirs:
one tag serves all."""


class InFlight(NamedTuple):
    """A stage that has been started: its result is there after :meth:`Mesh.finish`."""

    plan: Plan
    number: int
    """Which of the plan's stages."""
    sent: torch.Tensor
    """Kept until the stage is finished, since the network reads it."""
    received: torch.Tensor
    works: tuple[dist.Work, ...] = ()
    """What to wait for; a functional collective is waited for through `received`."""
    began: torch.Event | None = None
    """When it might begin, where somebody wants to know."""


@dataclass(frozen=True)
class Mesh:
    """A topology laid over the ranks of a group, as this rank sees it."""

    topology: Topology
    groups: dict[Stage, dist.ProcessGroup]
    """For each stage the group of ranks that this rank meets in it."""
    choose: Callable[[int], Plan]
    """The plan for a message of so many bytes: the same on every rank."""
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    lane: Lane = field(default_factory=Lane, compare=False)
    """Where the exchanges of this mesh run, those of a copy with other fields too."""
    timeout: timedelta = default_pg_timeout
    """How long a direct send waits for its peer; the groups know it for their collectives."""
    ahead: Callable[[int, int], bool] = lambda ahead_bytes, all_bytes: True
    """Whether a tensor of so many bytes is better sent ahead than in one message with the others, of so many together:
    the same on every rank. Asked where that is not found out by a trial."""

    traced: tuple[tuple[int, Plan], ...] = ()
    """Plans for graphs, each with the size below which it is used, ascending, the last one for all that is larger: as
    comparisons of sizes, they can be traced for sizes that are not known yet. Where there are none, `choose` is asked,
    which must then not look at the size."""
    part: str | None = None
    """Axes of a larger mesh that this one is over, for accounts: all of them at once are not flat there."""

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup,
        topology: Topology,
        plans: Iterable[Plan] | None = None,
        traffic: Traffic | None = None,
        timeout: timedelta | None = None,
        device: torch.device = CPU,
    ) -> "Mesh":
        """Make the groups of each stage. Every rank of `group` must call this, in the same order among its groups.

        Args:
            group: the group to lay the topology over, as large as the topology.
            topology: how its ranks nest.
            plans: those that may be used, the first of which is used until `choose` is replaced; all candidates, the
                flat one first, when not given.
            traffic: where to count what moves; an account of its own when not given.
            timeout: how long a collective may take; torch's default when not given.
            device: where messages lie. Those on an accelerator go through the host's memory where the group is gloo's.
        """
        ranks, here = dist.get_process_group_ranks(group), dist.get_rank(group)
        if len(ranks) != topology.size:
            raise ValueError(f"topology {topology} has {topology.size} ranks, the group has {len(ranks)}")
        roll_call.attend()
        plans = list(plans or candidates(topology))
        groups: dict[Stage, dist.ProcessGroup] = {}
        for stage in dict.fromkeys(stage for plan in plans for stage in plan.stages):
            members = tuple(ranks[i] for i in topology.neighbours(here, *stage))
            groups[stage] = subgroup(group, members)
            if timeout or groups[stage] is not group:
                set_timeout(groups[stage], timeout or default_pg_timeout)
        staged = devices.of(device.type).queues and dist.get_backend(group) == dist.Backend.GLOO
        traffic, lane = traffic or Traffic(), Lane(device, staged)
        return cls(topology, groups, lambda message_bytes: plans[0], traffic, lane, timeout or default_pg_timeout)

    def plan_for(self, message_bytes: int) -> Plan:
        """The plan for a message of so many bytes: the same on every rank."""
        if not (self.traced and torch.compiler.is_compiling()):
            return self.choose(message_bytes)
        for limit, plan in self.traced[:-1]:
            if message_bytes < limit:
                return plan
        return self.traced[-1][1]

    def post(
        self, message: torch.Tensor, plan: Plan, label: Label, finish: Callable[[torch.Tensor], Any]
    ) -> Handle[Any]:
        """Start :meth:`all_to_all` and return at once, where that can be.

        Args:
            message: must not change before the handle was waited for.
            plan: how.
            label: what it is.
            finish: what to make of the result once it was waited for.
        """
        span = self.traffic.span(label, message.device)
        if len(plan.stages) > 1 or self.lane.staged or self._sees_ends(message):
            return self.lane.start(str(label), lambda: self.travel(message, plan, span), finish, span.holds)
        # One stage needs nobody to carry it on, and need not wait for those before it.
        if span.taken:  # somebody has to see when it ends
            flight = self.start(message, plan, 0)
            return self.lane.start(str(label), lambda: self._arrive(flight, span), finish, span.holds)
        with span.travels():
            flight = self.start(message, plan, 0)
        return Handle(str(label), lambda: self.finish(flight), finish, span.holds)

    def _sees_ends(self, message: torch.Tensor) -> bool:
        """Whether a stream of its own is to see when the exchange ends: the caller's sees it after what it computes."""
        return self.traffic.timed and devices.of(message.device.type).queues

    def travel(self, message: torch.Tensor, plan: Plan, span: Span) -> torch.Tensor:
        """:meth:`all_to_all`, with the times taken."""
        with span.travels():
            return self.all_to_all(message, plan)

    def _arrive(self, flight: InFlight, span: Span) -> torch.Tensor:
        with span.travels():
            return self.finish(flight)

    def all_to_all(self, buffer: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Exchange shards: what this rank holds for rank j arrives there as what j received from this rank.

        Args:
            buffer: shape (*plan.shape, payload), indexed by destination. No copy is made before the first stage when
                its dim lies outermost in memory; each further stage costs one.
            plan: how; one of those that the mesh was made for.

        Returns:
            The same shape, indexed by source; a view whose memory order is that of the last stage.
        """
        if plan.chunks > 1:
            return self._pipelined(buffer, plan)
        for number in range(len(plan.stages)):
            buffer = self.finish(self.start(buffer, plan, number))
        return buffer

    def _pipelined(self, buffer: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Send chunk after chunk through the stages: while one crosses nodes, the next crosses tiles."""
        chunks = buffer.chunk(plan.chunks, -1)
        last = len(plan.stages) - 1
        flying: dict[int, InFlight] = {}
        for tick in range(len(chunks) + last):
            # The most advanced chunk first: it frees its stage for the one behind it.
            for chunk in range(max(0, tick - last), min(tick + 1, len(chunks))):
                number = tick - chunk
                part = self.finish(flying[chunk]) if number else chunks[chunk]
                flying[chunk] = self.start(part, plan, number)
        return torch.cat([self.finish(flying[chunk]) for chunk in range(len(chunks))], -1)

    def start(self, buffer: torch.Tensor, plan: Plan, number: int) -> InFlight:
        """Begin a stage with a buffer (*plan.shape, payload)."""
        dim, group = plan.dims[number], self.groups[plan.stages[number]]
        sent = (buffer.movedim(dim, 0) if dim else buffer).contiguous()
        if torch.compiler.is_compiling():  # a traced graph runs later: nothing to count then, and only collectives
            return InFlight(plan, number, sent, _functional(sent, group))
        label = self._label(plan, number)
        self.traffic.count(label, group.size(), sent)
        begin = _send_directly if plan.direct[number] else _collective
        with self.traffic.time(label, sent.device), roll_call.naming_the_lost(group, label):
            queues = devices.of(sent.device.type).queues
            outgoing = _on_host(sent) if self.lane.staged else sent
            received = torch.empty_like(outgoing, pin_memory=self.lane.staged and queues)
            began = self.traffic.begins(sent.device)
            return InFlight(plan, number, outgoing, *begin(outgoing, received, group), began)

    def _label(self, plan: Plan, number: int) -> str:
        return self.part if self.part and plan.labels[number] == FLAT else plan.labels[number]

    def finish(self, flight: InFlight) -> torch.Tensor:
        """Wait for a stage and return what arrived, shape (*plan.shape, payload), indexed by source."""
        plan, number, received = flight.plan, flight.number, flight.received
        if torch.compiler.is_compiling():
            received = _wait(received)
        else:
            label, group = self._label(plan, number), self.groups[plan.stages[number]]
            with self.traffic.time(label, flight.sent.device), roll_call.naming_the_lost(group, label):
                for work in flight.works:
                    # A collective has its group's timeout, and one that is passed here would hold up the host.
                    work.wait(self.timeout) if plan.direct[number] else work.wait()
                received = _wait(received)
            if self.lane.staged:
                received = received.to(self.lane.device, non_blocking=True)
            self.traffic.ends(label, flight.began)
            self._watch(label, group, flight.sent.device)
        received, dim = received.view(flight.sent.shape), plan.dims[number]
        return received.movedim(0, dim) if dim else received

    def _watch(self, label: str, group: dist.ProcessGroup, device: torch.device) -> None:
        """Have somebody see that a stage comes to its end for which the host does not wait: else the backend would end
        the process without naming who is missing."""
        watches = devices.of(device.type).queues and not self.lane.staged and roll_call.is_attended()
        if watches and not is_captured(device):
            ended = torch.Event(device.type)  # which holds nothing, where the collective's work holds its tensors
            ended.record()
            roll_call.expect(ended.query, group, label, self.timeout.total_seconds())


def _collective(
    sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, tuple[dist.Work, ...]]:
    if devices.of(sent.device.type).functional_only:
        return _functional(sent, group), ()
    return received, (dist.all_to_all_single(received, sent, group=group, async_op=True),)


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


_subgroups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups of ranks of a world, for as long as that lives: communicators are dear and are never freed singly, so there is
one for each distinct set of ranks, whoever asks for it."""


def subgroup(group: dist.ProcessGroup, members: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of some ranks of a group, by their global numbers; each of them must call this, in the same order among
    its groups. Others need not, so that Ulysses groups need not march in step."""
    if members == tuple(dist.get_process_group_ranks(group)):
        return group
    known = _subgroups.setdefault(dist.group.WORLD, {})
    if members not in known:
        options = None
        if dist.get_backend(group) == dist.Backend.NCCL:  # V is not to queue behind computation
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        with _unbound(dist.group.WORLD):
            known[members] = dist.new_group(members, pg_options=options, use_local_synchronization=True)
    return known[members]


@contextmanager
def _unbound(world: dist.ProcessGroup) -> Iterator[None]:
    """Make groups from nothing: NCCL's would be split off the world where a script has bound a device to it, and a
    split waits for all ranks of the world."""
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let a collective of a group take so long and no longer, where the backend (gloo, NCCL) can be told."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def _send_directly(
    sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, tuple[dist.Work, ...]]:
    """Start to swap shares with every rank of a group, all receives before the first send (see :mod:`plan`)."""
    size, here = group.size(), group.rank()
    shares, places = sent.view(size, -1), received.view(size, -1)
    # Peers by their distance from this rank, so that not all ranks turn to the same one first.
    works = [group.recv([places[(here - away) % size]], (here - away) % size, _TAG) for away in range(1, size)]
    works += [group.send([shares[(here + away) % size]], (here + away) % size, _TAG) for away in range(1, size)]
    places[here].copy_(shares[here])
    return received, tuple(works)
