"""The split of a mesh into slow axes, which are its outermost ones, and fast axes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from xfuser_cocodiff.engine.comm.groups import subgroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.engine.topology.coding_cost import CodingCost
from xfuser_cocodiff.engine.topology.topology import Topology


@dataclass(frozen=True)
class AxisLayout:
    """Numbers of coordinates on the slow and the fast axes of some ranks."""

    num_slow: int
    """Number of coordinates on the slow axes, S."""
    num_fast: int
    """Number of coordinates on the fast axes, F."""
    coding_cost: CodingCost | None = field(default=None, kw_only=True)
    """Cost by which layers are coded or not; None to code all of them, as where the user names the slow axes."""
    slow_axis_names: tuple[str, ...] = field(default=(), kw_only=True)
    """Names of the slow axes, outermost first; none for ranks that do not communicate."""
    is_asynchronous: bool = field(default=False, kw_only=True)
    """Whether messages are on a device whose host does not wait for them."""

    @classmethod
    def of(cls, topology: Topology, slow_axes: Sequence[str]) -> "AxisLayout":
        """Return the layout of a topology.

        Args:
            topology: the axes.
            slow_axes: names of the slow axes; those with several ranks are the outermost ones.

        Raises:
            ValueError: a slow axis is inside a fast one.
        """
        moving = [axis for axis in topology.axes if axis.size > 1]
        slow = [axis for axis in moving if axis.name in slow_axes]
        if slow != moving[: len(slow)]:
            raise ValueError(f"slow axes {', '.join(slow_axes)} must be the outermost ones of {topology}")
        num_slow = math.prod(axis.size for axis in slow)
        return cls(num_slow, topology.size // num_slow)

    def ranks_at(self, slow_index: int) -> range:
        """Return the ranks at a coordinate of the slow axes."""
        return range(slow_index * self.num_fast, (slow_index + 1) * self.num_fast)


@dataclass(frozen=True)
class AxisPartition(AxisLayout):
    """The ranks of a mesh, as one of them sees them, with a mesh for the slow axes and one for the fast axes."""

    rank: int
    """Rank of this process in the mesh of all axes."""
    slow: Mesh
    """Mesh of the slow axes."""
    fast: Mesh | None
    """Mesh of the fast axes; None if all axes are slow."""
    shape: tuple[int, int] = field(init=False, repr=False, compare=False)
    """Numbers of coordinates on the slow and on the fast axes."""
    slow_index: int = field(init=False, repr=False, compare=False)
    """Coordinate of this rank on the slow axes."""
    fast_index: int = field(init=False, repr=False, compare=False)
    """Coordinate of this rank on the fast axes."""
    remote_indices: list[int] = field(init=False, repr=False, compare=False)
    """Coordinates on the slow axes other than this rank's."""

    def __post_init__(self) -> None:
        # Computed once, because every coded layer reads them.
        slow_index, fast_index = divmod(self.rank, self.num_fast)
        derived = {
            "shape": (self.num_slow, self.num_fast),
            "slow_index": slow_index,
            "fast_index": fast_index,
            "remote_indices": [index for index in range(self.num_slow) if index != slow_index],
            "slow_axis_names": self.slow.topology.moving_axes,
            "is_asynchronous": devices.capabilities(self.slow.comm_stream.device.type).is_asynchronous,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

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
            slow_axes: names of the slow axes, see :meth:`AxisLayout.of`.
            make_mesh: creates a mesh over a group.
        """
        topology, rank, ranks = mesh.topology, dist.get_rank(group), dist.get_process_group_ranks(group)
        layout = AxisLayout.of(topology, slow_axes)
        if layout.num_slow == 1:
            return None
        if layout.num_fast == 1:
            return cls(layout.num_slow, 1, rank, mesh, None)

        def submesh(is_slow: bool) -> Mesh:
            dims = [dim for dim, axis in enumerate(topology.axes) if axis.size > 1]
            dims = [dim for dim in dims if (topology.axes[dim].name in slow_axes) is is_slow]
            members = tuple(ranks[i] for i in topology.group_of(rank, *dims))
            made = make_mesh(
                subgroup(group, members, mesh.stages.timeout), Topology(tuple(topology.axes[dim] for dim in dims))
            )
            return made.as_part_of(mesh, "+".join(topology.axes[dim].name for dim in reversed(dims)))

        return cls(layout.num_slow, layout.num_fast, rank, submesh(True), submesh(False))
