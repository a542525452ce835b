"""Topology bound to process groups: the all-to-all along the axes of a machine (TAPA), by any plan.

One collective per stage, each along its own dim of the buffer seen as (*plan.shape, payload), equals the flat one bit
for bit in any order of the stages.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.comm import failure_detection
from xfuser_cocodiff.engine.comm.comm_stream import CommStream, Handle
from xfuser_cocodiff.engine.comm.groups import subgroup
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.comm.stages import Stages
from xfuser_cocodiff.engine.comm.traffic import Label, Span, Traffic
from xfuser_cocodiff.engine.topology import devices as devices
from xfuser_cocodiff.engine.topology.devices import CPU
from xfuser_cocodiff.engine.topology.plans import Plan, Stage, candidates
from xfuser_cocodiff.engine.topology.topology import Topology


@dataclass(frozen=True)
class Mesh:
    """A topology laid over the ranks of a group, as this rank sees it."""

    topology: Topology
    stages: Stages
    """How messages move."""
    policy: PlanPolicy
    """By which plans."""
    comm_stream: CommStream = field(default_factory=CommStream, compare=False)
    """Where exchanges run that somebody has to carry on."""

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup,
        topology: Topology,
        plans: Iterable[Plan] | None = None,
        timeout: timedelta | None = None,
        device: torch.device = CPU,
    ) -> "Mesh":
        """Make the groups of each stage. Every rank of `group` must call this, in the same order among its groups.

        Args:
            group: the group to lay the topology over, as large as the topology.
            topology: how its ranks nest.
            plans: those that may be used, the first of which is used until there is another policy; all candidates, the
                flat one first, when not given.
            timeout: how long a stage may take; the backend's default when not given.
            device: where messages lie. Those on an accelerator go through the host's memory where the group is gloo's.
        """
        ranks, here = dist.get_process_group_ranks(group), dist.get_rank(group)
        if len(ranks) != topology.size:
            raise ValueError(f"topology {topology} has {topology.size} ranks, the group has {len(ranks)}")
        failure_detection.start_heartbeat()
        plans = list(plans or candidates(topology))
        groups: dict[Stage, dist.ProcessGroup] = {}
        for stage in dict.fromkeys(stage for plan in plans for stage in plan.stages):
            members = tuple(ranks[i] for i in topology.group_of(here, *stage))
            groups[stage] = subgroup(group, members, timeout)
        staged = devices.capabilities(device.type).is_asynchronous and dist.get_backend(group) == dist.Backend.GLOO
        stages = Stages(groups, device, staged, timeout)
        return cls(topology, stages, PlanPolicy(lambda message_bytes: plans[0]), CommStream(device, staged))

    @functools.cached_property
    def hierarchical_plan(self) -> Plan:
        """The plan of one stage per axis: how a buffer is seen that no plan has been chosen for."""
        return Plan.hierarchical(self.topology)

    @property
    def traffic(self) -> Traffic:
        """What moves, as it is counted."""
        return self.stages.traffic

    def with_separate_traffic(self) -> "Mesh":
        """The same mesh with an account of its own, for messages that are not the user's."""
        return replace(self, stages=replace(self.stages, traffic=Traffic()))

    def as_part_of(self, whole: "Mesh", name: str) -> "Mesh":
        """The same mesh as one over some axes of another, whose lane and account it shares; the name is of these."""
        stages = replace(self.stages, traffic=whole.traffic, flat_name=name)
        return replace(self, stages=stages, comm_stream=whole.comm_stream)

    def start_all_to_all(
        self,
        message: torch.Tensor,
        plan: Plan,
        label: Label,
        finish: Callable[[torch.Tensor], Any],
        is_blocking: bool = False,
    ) -> Handle[Any]:
        """Start :meth:`all_to_all` and return at once, where that can be.

        Args:
            message: must not change before the handle was waited for.
            plan: how.
            label: what it is.
            finish: what to make of the result once it was waited for.
            is_blocking: whether the caller waits for it next.
        """
        if len(plan.stages) > 1 or self.stages.staged or self._sees_ends(message):
            return self.start(label, lambda: self.all_to_all(message, plan), finish, is_blocking)
        span = self.traffic.span(label, message.device)
        # One stage needs nobody to carry it on, and need not wait for those before it.
        if span.is_timed:  # somebody has to see when it ends
            arrive = self.stages.start(message, plan, 0)
            return self.start(label, arrive, finish, is_blocking, span)
        with span.record_transfer():
            arrive = self.stages.start(message, plan, 0)
        return Handle(str(label), arrive, finish, span.record_wait)

    def start(
        self,
        label: Label,
        travel: Callable[[], Any],
        finish: Callable[[Any], Any],
        is_blocking: bool = False,
        span: Span | None = None,
    ) -> Handle[Any]:
        """Start an exchange in the lane.

        Args:
            label: what it is.
            travel: moves it and returns what has come.
            finish: what to make of that once it was waited for.
            is_blocking: whether the caller waits for it next.
            span: its times, where it has begun already.
        """
        span = span or self.traffic.span(label, self.comm_stream.device)

        def timed() -> Any:
            with span.record_transfer():
                return travel()

        return self.comm_stream.start(str(label), timed, finish, span.record_wait, is_blocking)

    def _sees_ends(self, message: torch.Tensor) -> bool:
        """Whether a stream of its own is to see when the exchange ends: the caller's sees it after what it computes."""
        return self.traffic.timed and devices.capabilities(message.device.type).is_asynchronous

    def timed_all_to_all(self, message: torch.Tensor, plan: Plan, span: Span) -> torch.Tensor:
        """:meth:`all_to_all`, with the times taken."""
        with span.record_transfer():
            return self.all_to_all(message, plan)

    def all_to_all(self, buffer: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Exchange shards: what this rank holds for rank j arrives there as what j received from this rank.

        Args:
            buffer: shape (*plan.shape, payload), indexed by destination. No copy is made before the first stage when
                its dim lies outermost in memory; each further stage costs one.
            plan: how; one of those that the mesh was made for.

        Returns:
            The same shape, indexed by source; a view whose memory order is that of the last stage.
        """
        return self.begin_all_to_all(buffer, plan)()

    def begin_all_to_all(self, buffer: torch.Tensor, plan: Plan) -> Callable[[], torch.Tensor]:
        """Start the first stage of :meth:`all_to_all`; what is returned carries it to its end. So two of them are under
        way beside each other."""
        first = self.stages.start(buffer, plan, 0)

        def go_on() -> torch.Tensor:
            arrived = first()
            for number in range(1, len(plan.stages)):
                arrived = self.stages.start(arrived, plan, number)()
            return arrived

        return go_on

    def gather_plan(self, block_bytes: int) -> Plan:
        """How an all-gather of blocks of so many bytes runs: by the policy, or else along one axis after the other, the
        outermost first."""
        return self.policy.choose_gather(block_bytes) or Plan.hierarchical_gather(
            self.topology, devices.capabilities(self.stages.device.type).supports_direct_sends
        )

    def all_gather(self, block: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Bring what each rank holds to all others. After each stage a rank has what all ranks of that stage had, and
        hands on all of it: a stage across slow links should be the first.

        Args:
            block: of this rank; as large on every rank.
            plan: how; one of those that the mesh was made for.

        Returns:
            Shape (*plan.shape, *block.shape), indexed by source; a view whose memory order is that of the last stage.
        """
        for number in range(len(plan.stages)):
            block = self.stages.start_gather(block, plan, number)()
        levels = len(plan.dims)
        lies = [levels - 1 - plan.dims.index(dim) for dim in range(levels)]  # the last stage outermost
        return block.permute(*lies, *range(levels, block.ndim))
