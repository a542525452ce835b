"""The axes of a mesh, parted into fast ones and slow ones, and how tensors lie on them.

Sizes in shapes: S places on slow axes, F on fast ones; n heads, s tokens and D head dim of what one rank holds for
another; B batch.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.comm.groups import subgroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.topology.topology import Topology


@dataclass(frozen=True)
class AxisLayout:
    """AxisLayout, parted into fast ones and slow ones, and how tensors lie on them."""

    slow_indices: tuple[int, ...]
    """Slow axes, by number."""
    shape: tuple[int, ...]
    """Places of all axes."""

    @functools.cached_property
    def num_slow(self) -> int:
        """On the slow axes."""
        return math.prod(self.shape[dim] for dim in self.slow_indices)

    @functools.cached_property
    def num_fast(self) -> int:
        """Places on the fast axes."""
        return math.prod(self.shape) // self.num_slow

    @functools.cached_property
    def _order(self) -> list[int]:
        """Slow axes, then fast ones."""
        return [*self.slow_indices, *(dim for dim in range(len(self.shape)) if dim not in self.slow_indices)]

    @functools.cached_property
    def ranks_by_slow_index(self) -> list[list[int]]:
        """Of each place on slow axes, those of the mesh's ranks that lie there, by their places on fast ones."""
        size = math.prod(self.shape)
        numbers = torch.arange(size).view(self.shape).permute(self._order)
        return numbers.reshape(self.num_slow, -1).tolist()

    def split(self, piece: torch.Tensor) -> torch.Tensor:
        """(*shape, ...) as (S, F, ...)."""
        levels = len(self.shape)
        ordered = piece.permute(*self._order, *range(levels, piece.ndim))
        slow = len(self.slow_indices)
        return ordered.reshape(self.num_slow, math.prod(ordered.shape[slow:levels]), *piece.shape[levels:])

    def slot_view(self, target: torch.Tensor, slots: int) -> tuple[torch.Tensor, bool]:
        """A target (*shape, B, n, s, D) as (S, F * B, n, s, D) for S places, or as (S * F, B, n, s, D) for as many as
        there are ranks, and whether that is the target itself rather than room of its own: axes that interleave cannot
        be seen as one."""
        levels = len(self.shape)
        ordered = target.permute(*self._order, *range(levels, target.ndim))
        shape = slots, math.prod(target.shape[: levels + 1]) // slots, *target.shape[levels + 1 :]
        try:
            return ordered.view(shape), True
        except RuntimeError:
            return target.new_empty(shape), False

    def join(self, split: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`split`; a view where there can be one."""
        sizes = [self.shape[dim] for dim in self._order]
        levels = len(sizes)
        ordered = split.reshape(*sizes, *split.shape[2:])
        back = sorted(range(levels), key=self._order.__getitem__)
        return ordered.permute(*back, *range(levels, ordered.ndim))


@dataclass(frozen=True)
class AxisPartition(AxisLayout):
    """The axes of a mesh that have more than one place."""

    slow_index: int
    """This rank's place on the slow axes."""
    slow: Mesh
    fast: Mesh | None
    """None where all axes are slow."""
    is_single_stage: Callable[[int], bool] = lambda message_bytes: False
    """Whether a message of so many bytes goes everywhere at once, rather than in stages, see :mod:`exchange`."""

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup,
        mesh: Mesh,
        slow_axes: Sequence[str],
        make: Callable[[dist.ProcessGroup, Topology], Mesh],
    ) -> "AxisPartition | None":
        """Part a mesh. Every rank of `group` must call this; None where no slow axis has more than one place.

        Args:
            group: the ranks of the mesh.
            mesh: whose lane and account the parts share.
            slow_axes: their names.
            make: makes a mesh over a group.
        """
        topology, rank, ranks = mesh.topology, dist.get_rank(group), dist.get_process_group_ranks(group)
        moving = [dim for dim, axis in enumerate(topology.axes) if axis.size > 1]
        slow = [dim for dim in moving if topology.axes[dim].name in slow_axes]
        fast = [dim for dim in moving if dim not in slow]

        def submesh(dims: list[int]) -> Mesh:
            if dims == moving:
                return mesh
            members = tuple(ranks[i] for i in topology.group_of(rank, *dims))
            own = subgroup(group, members, mesh.stages.timeout)
            made = make(own, Topology(tuple(topology.axes[dim] for dim in dims)))
            names = "+".join(topology.axes[dim].name for dim in reversed(dims))
            return made.as_part_of(mesh, names)

        if not slow:
            return None
        return cls(
            tuple(map(moving.index, slow)),
            tuple(topology.axes[dim].size for dim in moving),
            topology.group_of(rank, *slow).index(rank),
            submesh(slow),
            submesh(fast) if fast else None,
        )

    @functools.cached_property
    def remote_indices(self) -> list[int]:
        """Those that are not this rank's own."""
        return [place for place in range(self.num_slow) if place != self.slow_index]
