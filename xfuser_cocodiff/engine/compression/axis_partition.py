"""The split of a mesh's axes into slow and fast ones, and views of tensors by it.

Sizes in shapes: S coordinates on slow axes, F on fast axes; n heads, s tokens and D head dim of one rank's values for
another; B batch.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.comm.groups import subgroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.topology.coding_cost import CodingCost
from xfuser_cocodiff.engine.topology.topology import Topology


@dataclass(frozen=True)
class AxisLayout:
    """Axes by size, and which of them are slow."""

    slow_indices: tuple[int, ...]
    """Indices of the slow axes."""
    shape: tuple[int, ...]
    """Sizes of all axes."""

    num_slow: int = field(init=False, repr=False, compare=False)
    """Number of coordinates on the slow axes, S."""
    num_fast: int = field(init=False, repr=False, compare=False)
    """Number of coordinates on the fast axes, F."""

    def __post_init__(self) -> None:
        # Computed once: graphs that are traced read them, and the lock of a cached property would break the trace.
        num_slow = math.prod(self.shape[index] for index in self.slow_indices)
        object.__setattr__(self, "num_slow", num_slow)
        object.__setattr__(self, "num_fast", math.prod(self.shape) // num_slow)

    @functools.cached_property
    def _order(self) -> list[int]:
        """Indices of the slow axes, then of the fast ones."""
        return [*self.slow_indices, *(index for index in range(len(self.shape)) if index not in self.slow_indices)]

    @functools.cached_property
    def ranks_by_slow_index(self) -> list[list[int]]:
        """Ranks of the mesh at each coordinate of the slow axes, S lists of F ranks."""
        ranks = torch.arange(math.prod(self.shape)).view(self.shape).permute(self._order)
        return ranks.reshape(self.num_slow, -1).tolist()

    def split(self, piece: torch.Tensor) -> torch.Tensor:
        """Return a tensor (*shape, ...) as (S, F, ...)."""
        num_axes, num_slow_axes = len(self.shape), len(self.slow_indices)
        ordered = piece.permute(*self._order, *range(num_axes, piece.ndim))
        fast_shape = ordered.shape[num_slow_axes:num_axes]
        return ordered.reshape(self.num_slow, math.prod(fast_shape), *piece.shape[num_axes:])

    def slot_view(self, target: torch.Tensor, slots: int) -> tuple[torch.Tensor, bool]:
        """Return a target (*shape, B, n, s, D) by slots, and whether the result is a view of it.

        Axes that interleave have no such view; the result is a new tensor then.

        Args:
            target: tensor to write received values to.
            slots: S for the shape (S, F * B, n, s, D), or S * F for (S * F, B, n, s, D).
        """
        num_axes = len(self.shape)
        ordered = target.permute(*self._order, *range(num_axes, target.ndim))
        shape = slots, math.prod(target.shape[: num_axes + 1]) // slots, *target.shape[num_axes + 1 :]
        try:
            return ordered.view(shape), True
        except (RuntimeError, ValueError):  # fake tensors raise ValueError
            return target.new_empty(shape), False

    def join(self, split: torch.Tensor) -> torch.Tensor:
        """Return a tensor (S, F, ...) as (*shape, ...), if possible as a view; the inverse of :meth:`split`."""
        sizes = [self.shape[index] for index in self._order]
        num_axes = len(sizes)
        ordered = split.reshape(*sizes, *split.shape[2:])
        inverse = sorted(range(num_axes), key=self._order.__getitem__)
        return ordered.permute(*inverse, *range(num_axes, ordered.ndim))


@dataclass(frozen=True)
class AxisPartition(AxisLayout):
    """The axes of a mesh with more than one rank, with a mesh for the slow axes and one for the fast axes."""

    slow_index: int
    """Coordinate of this rank on the slow axes."""
    slow: Mesh
    """Mesh of the slow axes."""
    fast: Mesh | None
    """Mesh of the fast axes; None if all axes are slow."""
    rank: int
    """Rank of this process in the mesh of all axes."""
    is_single_stage: Callable[[int], bool] = lambda message_bytes: False
    """Whether messages of some bytes take one stage rather than several, see :mod:`coded_all_to_all`."""
    coding_cost: CodingCost | None = None
    """Cost by which layers are coded or not; None to code all of them, as where the user names the slow axes."""
    fast_index: int = field(init=False, repr=False, compare=False)
    """Coordinate of this rank on the fast axes."""

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup,
        mesh: Mesh,
        slow_axes: Sequence[str],
        make_mesh: Callable[[dist.ProcessGroup, Topology], Mesh],
    ) -> "AxisPartition | None":
        """Return the partition of a mesh, or None if no slow axis has more than one rank. A collective over `group`.

        Args:
            group: ranks of the mesh.
            mesh: mesh of all axes; the others share its comm stream and traffic statistics.
            slow_axes: names of the slow axes.
            make_mesh: creates a mesh over a group.
        """
        topology, rank, ranks = mesh.topology, dist.get_rank(group), dist.get_process_group_ranks(group)
        moving = [index for index, axis in enumerate(topology.axes) if axis.size > 1]
        slow = [index for index in moving if topology.axes[index].name in slow_axes]
        fast = [index for index in moving if index not in slow]

        def submesh(indices: list[int]) -> Mesh:
            if indices == moving:
                return mesh
            members = tuple(ranks[i] for i in topology.group_of(rank, *indices))
            members_group = subgroup(group, members, mesh.stages.timeout)
            made = make_mesh(members_group, Topology(tuple(topology.axes[index] for index in indices)))
            names = "+".join(topology.axes[index].name for index in reversed(indices))
            return made.as_part_of(mesh, names)

        if not slow:
            return None
        return cls(
            tuple(map(moving.index, slow)),
            tuple(topology.axes[index].size for index in moving),
            topology.group_of(rank, *slow).index(rank),
            submesh(slow),
            submesh(fast) if fast else None,
            rank,
        )

    @property
    def slow_axis_names(self) -> tuple[str, ...]:
        """Names of the slow axes, outermost first."""
        return tuple(axis.name for axis in self.slow.topology.axes if axis.size > 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        fast_index, rank, stride = 0, self.rank, 1
        for index in reversed(range(len(self.shape))):
            rank, coordinate = divmod(rank, self.shape[index])
            if index not in self.slow_indices:
                fast_index, stride = fast_index + stride * coordinate, stride * self.shape[index]
        object.__setattr__(self, "fast_index", fast_index)

    @functools.cached_property
    def remote_indices(self) -> list[int]:
        """Coordinates on the slow axes other than this rank's."""
        return [index for index in range(self.num_slow) if index != self.slow_index]
