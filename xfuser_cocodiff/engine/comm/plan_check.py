"""Self-check of the plans in use across the real groups: each must deliver what stock's flat all-to-all does.

By definition that is, for each sender, the block that it has for the receiver. Values tell sender, receiver and
position, so that every swap of ranks, slots or bytes shows, and no further group is needed to compare with.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.rank_results import gather_results
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.topology.plans import Plan

_POSITIONS = 8
"""Values of a block."""


class PlanCheckError(RuntimeError):
    """A plan delivers other values than stock's flat all-to-all; the same error on every rank."""


class CheckedMesh(NamedTuple):
    """A mesh over a Ulysses group or ring, or over some of its axes."""

    mesh: Mesh
    members: Sequence[int]
    """Ranks of the mesh in its order, by their number in the whole group."""


def check(meshes: Sequence[CheckedMesh], rank: int, size: int, host_group: dist.ProcessGroup | None) -> None:
    """Run one all-to-all by each plan in use. Every rank must call this.

    Groups and plans stay the same, so that once in a session is enough.

    Args:
        meshes: the meshes, in the same order on every rank.
        rank: number of this rank in the whole group.
        size: ranks in the whole group.
        host_group: all ranks of the run, in a group for host memory; None for those of a single process.

    Raises:
        PlanCheckError: a plan delivers other values on a rank; names plans and ranks, on every rank.
    """
    wrong = [str(plan) for each in meshes for plan in _plans(each.mesh) if not _delivers(each, plan, rank, size)]
    results = gather_results(lambda: wrong, host_group, "self-check of plans")
    if failed := {other: plans for other, plans in enumerate(results) if plans}:
        plans = ", ".join(dict.fromkeys(plan for each in failed.values() for plan in each))
        raise PlanCheckError(
            f"self-check: {plans} delivers other values than a flat all-to-all on ranks {', '.join(map(str, failed))}; "
            "--cocodiff_a2a flat avoids it. Please report this with the output of `cocodiff env`"
        )


def _plans(mesh: Mesh) -> list[Plan]:
    """Return the plans of all sizes, each once."""
    return list(dict.fromkeys(plan for _, plan in mesh.policy.plans))


def _delivers(checked: CheckedMesh, plan: Plan, rank: int, size: int) -> bool:
    """Return whether an all-to-all by a plan delivers the values that are meant for this rank."""
    mesh, members = checked.mesh.with_separate_traffic(), torch.tensor(checked.members)
    positions = torch.arange(_POSITIONS)

    def blocks(senders: torch.Tensor | int, receivers: torch.Tensor | int) -> torch.Tensor:
        pairs = torch.as_tensor(senders * size + receivers)
        return (pairs[:, None] * _POSITIONS + positions).int()

    sent = blocks(rank, members).to(mesh.stages.device)
    arrived = mesh.comm_stream.run(lambda: mesh.all_to_all(sent.view(*plan.shape, -1), plan), Label("the self-check"))
    return torch.equal(arrived.reshape(sent.shape).cpu(), blocks(members, rank))
