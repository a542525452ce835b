"""The site of xDiT where what ranks have of a sequence comes together, such as the output of a transformer: each block
crosses a slow link once, and not once for every rank behind it."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.settings.ring_placement import INNER
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platforms.platform import is_captured
from xfuser_cocodiff.xdit.session.session import Session, active


def patches() -> list[Patch]:
    """The row that puts the gather in place."""
    return [
        Patch(
            "xfuser.core.distributed.group_coordinator",
            "GroupCoordinator.all_gather",
            "tokens of all ranks",
            _along_the_topology,
            ("self", "input_", "dim", "separate_tensors"),
        ),
    ]


def _along_the_topology(original: Callable) -> Callable:
    @functools.wraps(original)
    def all_gather(
        self: Any, input_: torch.Tensor, dim: int = 0, separate_tensors: bool = False
    ) -> torch.Tensor | list[torch.Tensor]:
        is_traced = torch.compiler.is_compiling()  # graphs have stock's
        is_piecemeal = separate_tensors and dim != 0  # stock's tensors are pieces of several ranks' then
        takes = not (is_traced or is_piecemeal) and _is_of_a_sequence(self) and dim in range(-input_.ndim, input_.ndim)
        blocks = gather_along_topology(active(), input_, self.world_size) if takes else None
        if blocks is None:
            return original(self, input_, dim, separate_tensors)
        return list(blocks) if separate_tensors else torch.cat(list(blocks), dim)

    return all_gather


def _is_of_a_sequence(group: object) -> bool:
    """Whether a group of xDiT's is that of all ranks that share a sequence."""
    from xfuser.core.distributed import parallel_state

    return group is parallel_state._SP and not is_captured()


def gather_along_topology(session: Session, block: torch.Tensor, ranks: int) -> torch.Tensor | None:
    """What each of so many ranks has, which all of them must call for.

    Args:
        session: its Ulysses group, and its ring, are those that are gathered along.
        block: as large on every rank.
        ranks: that share a sequence.

    Returns:
        Shape (ranks, *block.shape), in their order; None where nothing is known of the links yet, or one collective is
        the fastest way.
    """
    every = (session.ring and session.ring.mesh, session.mesh)  # the outer one first
    meshes = [mesh for mesh in every if mesh and mesh.topology.size > 1]
    if session.config and session.config.ring == INNER:
        meshes.reverse()
    # Where a ring is xDiT's own, the plugin knows but a part of the ranks; and not every backend knows types of 8 bits.
    if not meshes or math.prod(mesh.topology.size for mesh in meshes) != ranks or block.element_size() == 1:
        return None
    plans, size = [], block.nbytes
    for mesh in meshes:
        plans.append(mesh.policy.choose_gather(size))
        size *= mesh.topology.size
    if None in plans or plans == [Plan.flat(meshes[0].topology)]:
        return None
    shape = block.shape
    for mesh, plan in zip(meshes, plans, strict=True):
        block = _come(block, mesh, plan)
    # Of two meshes, what has come along the inner one has come to be outermost.
    return (block.transpose(0, 1) if len(meshes) > 1 else block).reshape(ranks, *shape)


def _come(block: torch.Tensor, mesh: Mesh, plan: Plan) -> torch.Tensor:
    """(ranks of the mesh, *block.shape). It is no all-to-all, of which accounts are kept."""
    found = mesh.comm_stream.run(lambda: mesh.with_separate_traffic().all_gather(block, plan))
    return found.reshape(mesh.topology.size, *block.shape)
