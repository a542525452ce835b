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
from xfuser_cocodiff.engine.comm.comm_stream import CommStream, Handle, HostThread
from xfuser_cocodiff.engine.comm.groups import subgroup, timeout_of
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.comm.stages import Stages
from xfuser_cocodiff.engine.comm.traffic import Label, Traffic
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
    comm_stream: CommStream = field(default_factory=HostThread, compare=False)
    """Stream or thread of operations that run beside the caller."""

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
        first = timeout or min(timeout_of(each, device) for each in groups.values())
        comm_stream = CommStream.on(device, staged, ranks, first.total_seconds())
        return cls(topology, Stages(groups, device, staged, timeout), PlanPolicy.fixed(plans[0]), comm_stream)

    @property
    def traffic(self) -> Traffic:
        """Statistics of all messages."""
        return self.stages.traffic

    def with_separate_traffic(self) -> "Mesh":
        """Return the mesh with statistics of its own, for messages that are not part of the user's model."""
        return replace(self, stages=replace(self.stages, traffic=Traffic()))

    def as_part_of(self, whole: "Mesh", name: str) -> "Mesh":
        """Return the mesh as a part of another one, with which its operations are in order, and its statistics shared.

        Args:
            whole: mesh over more axes.
            name: name of this mesh's axes in the statistics.
        """
        stages = replace(self.stages, traffic=whole.traffic, flat_name=name)
        return replace(self, stages=stages, comm_stream=self.comm_stream.joined_to(whole.comm_stream))

    def start(
        self, label: Label, work: Callable[[], Any], finish: Callable[[Any], Any], is_blocking: bool = False
    ) -> Handle[Any]:
        """Start an operation on the comm stream; see :meth:`CommStream.start`."""
        return self.comm_stream.start(label, work, finish, is_blocking)

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
        if len(plan.stages) > 1:
            return self.start(label, lambda: self.all_to_all(message, plan), finish, is_blocking)
        begin = functools.partial(self.stages.start, message, plan, 0)
        return self.comm_stream.start_collective(label, begin, finish, is_blocking)

    def all_to_all(self, buffer: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Run an all-to-all: the block for rank j arrives there as the block from this rank.

        Args:
            buffer: shape (*plan.shape, payload), indexed by destination. The first stage makes no copy if its dim is
                the outermost one in memory; each further stage makes one.
            plan: one of the plans that the mesh was created for.

        Returns:
            The same shape, indexed by source; a view in the memory order of the last stage.
        """
        for number in range(len(plan.stages)):
            buffer = self.stages.start(buffer, plan, number)()
        return buffer

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
