"""Patch of xDiT's all-gather over the ranks of a sequence, such as that of a transformer's output.

Along the topology each block crosses a slow link once, rather than once for every rank behind it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platforms.platform import is_captured
from xfuser_cocodiff.xdit.session.session import Session, active
from xfuser_cocodiff.xdit.settings.ring_placement import INNER


def patches() -> list[Patch]:
    """Return the patch of the all-gather."""
    return [
        Patch(
            "xfuser.core.distributed.group_coordinator",
            "GroupCoordinator.all_gather",
            "all-gather of a sequence along the topology",
            _with_topology,
            ("self", "input_", "dim", "separate_tensors"),
        ),
    ]


def _with_topology(original: Callable) -> Callable:
    @functools.wraps(original)
    def all_gather(
        self: Any, input_: torch.Tensor, dim: int = 0, separate_tensors: bool = False
    ) -> torch.Tensor | list[torch.Tensor]:
        is_traced = torch.compiler.is_compiling()  # compiled graphs use stock's
        mixes_ranks = separate_tensors and dim != 0  # each of stock's tensors then has pieces of several ranks
        is_ours = (
            not (is_traced or mixes_ranks or is_captured())
            and dim in range(-input_.ndim, input_.ndim)
            and active().mesh is not None
            and self is host.sequence_group()
        )
        blocks = gather_along_topology(active(), input_, self.world_size) if is_ours else None
        if blocks is None:
            return original(self, input_, dim, separate_tensors)
        return list(blocks) if separate_tensors else torch.cat(list(blocks), dim)

    return all_gather


def gather_along_topology(session: Session, block: torch.Tensor, ranks: int) -> torch.Tensor | None:
    """Gather the blocks of all ranks along the topology. All of them must call this.

    Args:
        session: session whose Ulysses group and ring the ranks form.
        block: block of this rank, of the same size on every rank.
        ranks: number of ranks that share a sequence.

    Returns:
        Shape (ranks, *block.shape), by rank; None if links are not measured yet, or one flat collective is fastest.
    """
    both = (session.ring and session.ring.mesh, session.mesh)  # outer one first
    meshes = [mesh for mesh in both if mesh and mesh.topology.size > 1]
    if session.config and session.config.ring == INNER:
        meshes.reverse()
    # If the ring is xDiT's own, the plugin has a mesh of some ranks only. Not every backend supports 8-bit types.
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
        block = _gather(block, mesh, plan)
    # Of two meshes, the inner one was gathered last, and its dim is the outermost.
    return (block.transpose(0, 1) if len(meshes) > 1 else block).reshape(ranks, *shape)


def _gather(block: torch.Tensor, mesh: Mesh, plan: Plan) -> torch.Tensor:
    """Gather the blocks of a mesh, shape (ranks of the mesh, *block.shape), without statistics of all-to-alls."""
    gathered = mesh.comm_stream.run(lambda: mesh.with_separate_traffic().all_gather(block, plan))
    return gathered.reshape(mesh.topology.size, *block.shape)
