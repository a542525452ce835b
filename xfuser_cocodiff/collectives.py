"""Topology bound to process groups: the flat and the hierarchical (TAPA) all-to-all.

One collective per axis, each along its own dim of the buffer seen as (*axes, payload), equals the flat all-to-all bit
for bit in any order of the axes; flat is the topology with one axis. Functional collectives throughout: on Intel GPUs
the in-place all_to_all_single is known to corrupt data (intel/torch-xpu-ops#3021), and torch.compile can trace them.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from xfuser_cocodiff.topology import Axis, Topology
from xfuser_cocodiff.traffic import Traffic


@dataclass(frozen=True)
class Phase:
    """One collective of an all-to-all: along axis number `dim`, among the ranks of `group`."""

    dim: int
    axis: Axis
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Mesh:
    """A topology laid over the ranks of a group, as this rank sees it."""

    topology: Topology
    phases: tuple[Phase, ...]
    """In the order in which they run: fast, inner axes first."""
    traffic: Traffic = field(default_factory=Traffic, compare=False)

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup,
        topology: Topology,
        order: Sequence[int] | None = None,
        traffic: Traffic | None = None,
    ) -> "Mesh":
        """Make the groups of each axis. Every rank of `group` must call this, in the same order among its groups.

        Args:
            group: the group to lay the topology over, as large as the topology.
            topology: how its ranks nest.
            order: axis numbers in the order of the phases; innermost first when not given.
            traffic: where to count what moves; an account of its own when not given.
        """
        ranks, here = dist.get_process_group_ranks(group), dist.get_rank(group)
        if len(ranks) != topology.size:
            raise ValueError(f"topology {topology} has {topology.size} ranks, the group has {len(ranks)}")
        order = range(len(topology.axes) - 1, -1, -1) if order is None else order
        phases = []
        for dim in order:
            axis = topology.axes[dim]
            if axis.size == 1:
                continue
            members = [ranks[i] for i in topology.neighbours(here, dim)]
            # Only the members make the group, so that Ulysses groups need not march in step.
            whole = len(members) == len(ranks)
            phases.append(Phase(dim, axis, group if whole else dist.new_group(members, use_local_synchronization=True)))
        return cls(topology, tuple(phases), traffic or Traffic())

    @property
    def first_dim(self) -> int:
        """Axis number along which a buffer must lie outermost in memory to start without a copy."""
        return self.phases[0].dim if self.phases else 0

    def all_to_all(self, buffer: torch.Tensor) -> torch.Tensor:
        """Exchange shards: what this rank holds for rank j arrives there as what j received from this rank.

        Args:
            buffer: shape (*topology.shape, ...), indexed by destination. No copy is made before the first phase when
                the axis `first_dim` lies outermost in memory; each further phase costs one.

        Returns:
            The same shape, indexed by source; a view whose memory order is that of the last phase.
        """
        for phase in self.phases:
            outermost = buffer.movedim(phase.dim, 0).contiguous()
            buffer = self._along(phase, outermost).movedim(0, phase.dim)
        return buffer

    def _along(self, phase: Phase, buffer: torch.Tensor) -> torch.Tensor:
        # A traced graph runs later than this line: nothing to count or time here then.
        tracing = torch.compiler.is_compiling()
        account = self.traffic.collective(phase.axis.name, phase.axis.size, buffer)
        with contextlib.nullcontext() if tracing else account:
            received = functional.all_to_all_single(buffer.flatten(), None, None, phase.group)
            if isinstance(received, functional.AsyncCollectiveTensor):
                received = received.wait()
        return received.view(buffer.shape)
