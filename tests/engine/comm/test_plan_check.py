"""The self-check of plans finds permuted groups, on every rank, and agrees with stock's flat all-to-all."""

import dataclasses
from unittest import mock

import torch.distributed as dist

from tests import ranks
from xfuser_cocodiff.engine.comm import plan_check
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.plan_check import CheckedMesh, PlanCheckError
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.topology.plans import candidates
from xfuser_cocodiff.engine.topology.topology import Topology


def check(rank: int, permuted: bool) -> None:
    """Check all plans of 2x2 ranks; optionally the groups of the inner axis are those of the outer one."""
    topology = Topology.parse("2x2", 4)
    mesh = Mesh.over(dist.group.WORLD, topology)
    plans = tuple((size, plan) for size, plan in enumerate(candidates(topology)))
    mesh = dataclasses.replace(mesh, policy=PlanPolicy(plans))
    if permuted:
        groups = {**mesh.stages.groups, (0,): mesh.stages.groups[1,], (1,): mesh.stages.groups[0,]}
        mesh = dataclasses.replace(mesh, stages=dataclasses.replace(mesh.stages, groups=groups))
    plan_check.check([CheckedMesh(mesh, range(4))], rank, 4, dist.group.WORLD)
    assert not mesh.traffic.calls  # not part of the user's model


def test_right_groups_pass() -> None:
    ranks.run(check, 4, False)


def test_permuted_groups_are_named_on_every_rank() -> None:
    for error in ranks.outcomes(check, 4, True):
        assert isinstance(error, PlanCheckError)
        assert "hierarchical:gpu,node" in str(error) and "on ranks 0, 1, 2, 3" in str(error)
        assert " flat," not in str(error)


def check_one_rank(rank: int) -> None:
    """Check halves of a group, in which one rank's values arrive in another order."""
    members = [rank // 2 * 2, rank // 2 * 2 + 1]
    mesh = Mesh.over(dist.new_group(members, use_local_synchronization=True), Topology.flat(2))
    real = Mesh.all_to_all
    with mock.patch.object(Mesh, "all_to_all", lambda *given: real(*given).flip(0) if rank == 1 else real(*given)):
        plan_check.check([CheckedMesh(mesh, members)], rank, 4, dist.group.WORLD)


def test_one_failing_rank_is_the_error_of_all() -> None:
    for error in ranks.outcomes(check_one_rank, 4):
        assert isinstance(error, PlanCheckError) and "on ranks 1;" in str(error)
