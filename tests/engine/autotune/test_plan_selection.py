"""Which plan an exchange goes by: the planner's choice, the same on every rank."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.engine.topology.test_planner import profile_of
from xfuser_cocodiff.engine.attention.reshard import reshard
from xfuser_cocodiff.engine.autotune import plan_selection
from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.settings.config import MEASURED_SLOW_AXES, CocoDiffConfig
from xfuser_cocodiff.engine.topology.plans import Plan

CPU = torch.device("cpu")
# A collective costs next to nothing to start and each message a lot, so that small messages go by axis.
MACHINE = profile_of([2, 2], [1e8, 1e8], latency=1e-3, launch=1e-6)


XPU = torch.device("xpu", 0)


def test_direct_sends_are_for_the_cpu() -> None:
    machine = dataclasses.replace(MACHINE, direct=MACHINE)
    assert plan_selection.profile_for_device(machine, CPU).direct == MACHINE
    assert plan_selection.profile_for_device(machine, XPU).direct is None
    direct = Plan.parse("hierarchical:gpu*,node", machine.topology)
    plan_selection.check_plan_on_device(direct, CPU, "--cocodiff_a2a")
    plan_selection.check_plan_on_device(Plan.flat(machine.topology), XPU, "--cocodiff_a2a")
    with pytest.raises(ValueError, match=r"--cocodiff_a2a: 'hierarchical:gpu\*,node' .*valid on xpu are plans without"):
        plan_selection.check_plan_on_device(direct, XPU, "--cocodiff_a2a")


def blocking(rank: int) -> list[bool]:
    """Whether V, which is worth its call, is sent ahead by a mesh of collectives that overlap, or run one by one."""
    config = CocoDiffConfig(topology=MACHINE.topology, profile=MACHINE)
    meshes = [
        plan_selection.set_up_comm(dist.group.WORLD, dataclasses.replace(config, synchronous=synchronous), CPU).mesh
        for synchronous in (False, True)
    ]
    return [mesh.policy.sends_early(10**8, 3 * 10**8) for mesh in meshes] + [
        mesh.policy.sends_early_in_graph(10**8) for mesh in meshes
    ]


def test_nothing_is_sent_ahead_where_collectives_are_known_to_block() -> None:
    assert ranks.run(blocking, 4) == [[True, False, True, False]] * 4


def test_graphs_know_the_plan_of_every_size() -> None:
    plans = plan_selection.PlanTable(profile_of([2, 2], [1e8, 1e6], latency=1e-3, launch=1e-6))
    policy = PlanPolicy(plans, plans.table())
    sizes = [64, 1000, 2**15, 10**5, 10**6, 10**7, 2**33, 2**50]
    with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
        traced = [policy.plan_for(size) for size in sizes]
    assert traced == [plans(size) for size in sizes] and len(set(traced)) > 1
    assert len(policy.graph_plans) == len(set(policy.graph_plans)) < len(plan_selection.SIZES)


def exchange_compiled(rank: int) -> tuple[list[str], list[str]]:
    """Stages that eager and traced exchanges of one size went through, once they were found equal."""
    plans = plan_selection.PlanTable(MACHINE)
    mesh = Mesh.over(dist.group.WORLD, MACHINE.topology)
    mesh = dataclasses.replace(mesh, policy=PlanPolicy(plans, plans.table()))
    tensor = torch.randn(1, 4, 8, 4)

    def exchange(tensor: torch.Tensor) -> torch.Tensor:
        return reshard([tensor * 2], 1, 2, mesh)[0] + 1

    traced = torch.compile(exchange, backend="aot_eager", fullgraph=True)(tensor)
    before = list(mesh.traffic.calls)
    assert torch.equal(traced, exchange(tensor))
    return before, list(mesh.traffic.calls)


def test_a_traced_exchange_equals_an_eager_one() -> None:
    for traced, eager in ranks.run(exchange_compiled, 4):
        assert traced == []  # nothing was counted, so it was traced and did not fall back to eager code
        assert eager


def other_slow_axes(rank: int) -> tuple[list[str], str]:
    """Slow axes where each half of the ranks has found another profile, as beside a ring."""
    halves = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])]
    speeds = [1e6, 1e12] if rank < 4 else [1e12, 1e12]
    config = CocoDiffConfig(topology=MACHINE.topology, mode="balanced", slow_axes=MEASURED_SLOW_AXES)

    def largest(values: list[float]) -> list[float]:
        everybody = torch.tensor(values)
        dist.all_reduce(everybody, dist.ReduceOp.MAX)
        return everybody.tolist()

    profile = dataclasses.replace(profile_of([2, 2], speeds, latency=1e-3, launch=1e-6), codec_bytes_per_second=1e9)
    partition = plan_selection.set_up_comm(halves[rank // 4], config, CPU, TuningCache({}, profile), largest).partition
    return list(profile.slow_axes), [partition.slow_indices, partition.num_slow]


def test_an_axis_that_is_slow_for_one_ulysses_group_is_slow_for_all() -> None:
    """Ranks of a ring agree on what codecs did: a group without them would not come."""
    found = ranks.run(other_slow_axes, 8)
    assert len({str(alone) for alone, _ in found}) == 2
    assert all(partition == found[0][1] for _, partition in found)


def ways(rank: int) -> list[list[bool]]:
    """Whether small and large coded exchanges take all axes at once, where plans are found and where one is given."""
    profile = profile_of([2, 2], [1e6, 1e7], latency=1e-3, launch=1e-4)
    found = []
    for plan in (None, Plan.hierarchical(profile.topology)):
        config = CocoDiffConfig(topology=profile.topology, mode="balanced", slow_axes=("node",), plan=plan)
        partition = plan_selection.set_up_comm(dist.group.WORLD, config, CPU, TuningCache({}, profile)).partition
        found.append([partition.is_single_stage(size) for size in (1000, 1_000_000)])
    return found


def test_coded_exchanges_take_the_way_that_the_planner_finds_faster() -> None:
    assert ranks.run(ways, 4) == [[[False, True], [False, False]]] * 4
