"""The mesh: a topology bound to process groups, with all-to-alls along its axes (TAPA) by any plan.

One collective per stage, each along its own dim of the buffer seen as (*plan.shape, payload), is bit-identical to the
flat collective, in any order of the stages.
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
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.engine.topology.devices import CPU
from xfuser_cocodiff.engine.topology.plans import Plan, Stage, candidates
from xfuser_cocodiff.engine.topology.topology import Topology


@dataclass(frozen=True)
class Mesh:
    """A topology laid over the ranks of a group, as one of them sees it."""

    topology: Topology
    stages: Stages
    """Process groups of the stages, and their execution."""
    policy: PlanPolicy
    """Plans by message size."""
    comm_stream: CommStream = field(default_factory=CommStream, compare=False)
    """Stream or thread of operations that run beside the caller."""
    is_part: bool = False
    """Whether the mesh is a part of another one, with which it shares the comm stream."""

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup,
        topology: Topology,
        plans: Iterable[Plan] | None = None,
        timeout: timedelta | None = None,
        device: torch.device = CPU,
    ) -> "Mesh":
        """Return a mesh over a group, with a process group for each stage of the plans.

        Every rank of `group` must call this, in the same order among its groups.

        Args:
            group: group of as many ranks as the topology has.
            topology: nesting of the ranks.
            plans: plans that may be used; the first one is used until the policy is replaced. All candidates, starting
                with the flat one, when not given.
            timeout: timeout of a stage; the backend's default when not given.
            device: device of the messages. With a gloo group, those on an accelerator go through host memory.

        Raises:
            ValueError: the sizes of group and topology differ.
        """
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
        if len(ranks) != topology.size:
            raise ValueError(f"topology {topology} has {topology.size} ranks, the group has {len(ranks)}")
        failure_detection.start_heartbeat()
        plans = list(plans or candidates(topology))
        groups: dict[Stage, dist.ProcessGroup] = {}
        for stage in dict.fromkeys(stage for plan in plans for stage in plan.stages):
            members = tuple(ranks[i] for i in topology.group_of(rank, *stage))
            groups[stage] = subgroup(group, members, timeout)
        staged = devices.capabilities(device.type).is_asynchronous and dist.get_backend(group) == dist.Backend.GLOO
        stages = Stages(groups, device, staged, timeout, ranks=ranks)
        return cls(topology, stages, PlanPolicy(lambda message_bytes: plans[0]), CommStream(device, staged))

    @functools.cached_property
    def hierarchical_plan(self) -> Plan:
        """Plan of one stage per axis, used to lay out buffers for which no plan has been chosen."""
        return Plan.hierarchical(self.topology)

    @property
    def traffic(self) -> Traffic:
        """Statistics of all messages."""
        return self.stages.traffic

    def with_separate_traffic(self) -> "Mesh":
        """Return the mesh with statistics of its own, for messages that are not part of the user's model."""
        return replace(self, stages=replace(self.stages, traffic=Traffic()))

    def as_part_of(self, whole: "Mesh", name: str) -> "Mesh":
        """Return the mesh as a part of another one, whose comm stream and statistics it then shares.

        Args:
            whole: mesh over more axes.
            name: name of this mesh's axes in the statistics.
        """
        stages = replace(self.stages, traffic=whole.traffic, flat_name=name)
        return replace(self, stages=stages, comm_stream=whole.comm_stream, is_part=True)

    def start_all_to_all(
        self,
        message: torch.Tensor,
        plan: Plan,
        label: Label,
        finish: Callable[[torch.Tensor], Any],
        is_blocking: bool = False,
    ) -> Handle[Any]:
        """Start :meth:`all_to_all` asynchronously.

        Args:
            message: buffer to send; it must not change before the handle has been waited for.
            plan: plan of the all-to-all.
            label: tensors and layer.
            finish: converts the result after the wait.
            is_blocking: whether the caller waits right away.
        """
        is_multi_stage = len(plan.stages) > 1
        if is_multi_stage or self.stages.staged or self._times_on_stream(message) or self._keeps_order(message):
            return self.start(label, lambda: self.all_to_all(message, plan), finish, is_blocking)
        span = self.traffic.span(label, message.device)
        # A single stage needs no thread or stream to start the next one.
        if span.is_timed:  # the comm stream's thread records when it ends
            wait = self.stages.start(message, plan, 0)
            return self.start(label, wait, finish, is_blocking, span)
        with span.record_transfer():
            wait = self.stages.start(message, plan, 0)
        return Handle(str(label), wait, finish, span.record_wait)

    def _keeps_order(self, message: torch.Tensor) -> bool:
        """Return whether a single stage waits for earlier operations.

        On a part of a mesh, it could start between two collectives of an operation on the comm stream, and on other
        ranks before or after them. On an accelerator, collectives of different groups run at the same time. With
        several axes, a message in one stage would take links from an earlier one in several stages, which the caller
        needs first.
        """
        return self.is_part or (self._has_several_axes and devices.capabilities(message.device.type).is_asynchronous)

    @functools.cached_property
    def _has_several_axes(self) -> bool:
        return sum(axis.size > 1 for axis in self.topology.axes) > 1

    def start(
        self,
        label: Label,
        work: Callable[[], Any],
        finish: Callable[[Any], Any],
        is_blocking: bool = False,
        span: Span | None = None,
    ) -> Handle[Any]:
        """Start an operation on the comm stream.

        Args:
            label: tensors and layer.
            work: the operation.
            finish: converts its result after the wait.
            is_blocking: whether the caller waits right away.
            span: span of the operation, if it has begun already.
        """
        span = span or self.traffic.span(label, self.comm_stream.device)

        def timed() -> Any:
            with span.record_transfer():
                return work()

        return self.comm_stream.start(str(label), timed, finish, span.record_wait, is_blocking)

    def _times_on_stream(self, message: torch.Tensor) -> bool:
        """Return whether the comm stream records the end: the caller's stream may be busy with computation then."""
        return self.traffic.timed and devices.capabilities(message.device.type).is_asynchronous

    def all_to_all(self, buffer: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Run an all-to-all: the block for rank j arrives there as the block from this rank.

        Args:
            buffer: shape (*plan.shape, payload), indexed by destination. The first stage makes no copy if its dim is
                the outermost one in memory; each further stage makes one.
            plan: one of the plans that the mesh was created for.

        Returns:
            The same shape, indexed by source; a view in the memory order of the last stage.
        """
        return self.begin_all_to_all(buffer, plan)()

    def begin_all_to_all(self, buffer: torch.Tensor, plan: Plan) -> Callable[[], torch.Tensor]:
        """Start the first stage of :meth:`all_to_all` and return a function that runs the rest.

        So the first stages of two all-to-alls can be in flight together.
        """
        wait = self.stages.start(buffer, plan, 0)

        def complete() -> torch.Tensor:
            arrived = wait()
            for number in range(1, len(plan.stages)):
                arrived = self.stages.start(arrived, plan, number)()
            return arrived

        return complete

    def gather_plan(self, block_bytes: int) -> Plan:
        """Return the plan of an all-gather: the policy's, else one stage per axis, outermost first."""
        return self.policy.choose_gather(block_bytes) or Plan.hierarchical_gather(self.topology)

    def all_gather(self, block: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Gather the blocks of all ranks.

        Each stage sends everything gathered so far, so a stage across slow links should come first.

        Args:
            block: block of this rank; the same shape on every rank.
            plan: one of the plans that the mesh was created for.

        Returns:
            Shape (*plan.shape, *block.shape), indexed by source; a view in the memory order of the last stage.
        """
        for number in range(len(plan.stages)):
            block = self.stages.start_gather(block, plan, number)()
        levels = len(plan.dims)
        order = [levels - 1 - plan.dims.index(dim) for dim in range(levels)]  # the last stage is outermost
        return block.permute(*order, *range(levels, block.ndim))
