"""Plan selection: the planner's choice, the same on every rank."""

import dataclasses

import torch
import torch.distributed as dist

from tests import ranks
from tests.engine.topology.test_planner import profile_of
from xfuser_cocodiff.engine.attention.reshard import reshard
from xfuser_cocodiff.engine.autotune import comm_setup, plans_by_size
from xfuser_cocodiff.engine.autotune.comm_config import CommConfig
from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.topology.coding_cost import CodingCost

CPU = torch.device("cpu")
# Launches are cheap and messages expensive, so that small messages have hierarchical plans.
MACHINE = profile_of([2, 2], [1e8, 1e8], latency=1e-3, launch=1e-6)


def early_sends(rank: int) -> list[bool]:
    """Return whether V is sent early with asynchronous and synchronous collectives, in eager code and in graphs."""
    config = CommConfig(topology=MACHINE.topology, profile=MACHINE)
    meshes = [
        comm_setup.set_up_comm(dist.group.WORLD, dataclasses.replace(config, synchronous=synchronous), CPU).mesh
        for synchronous in (False, True)
    ]
    return [mesh.policy.sends_early(10**8, 3 * 10**8) for mesh in meshes] + [
        mesh.policy.sends_early_in_graph(10**8) for mesh in meshes
    ]


def test_nothing_is_sent_early_with_synchronous_collectives() -> None:
    assert ranks.run(early_sends, 4) == [[True, False, True, False]] * 4


def reshard_compiled(rank: int) -> tuple[list[str], list[str]]:
    """Return the stages counted for traced and for eager resharding, after comparing their results."""
    mesh = Mesh.over(dist.group.WORLD, MACHINE.topology)
    mesh = dataclasses.replace(mesh, policy=plans_by_size.planned(MACHINE))
    tensor = torch.randn(1, 4, 8, 4)

    def reshard_between(tensor: torch.Tensor) -> torch.Tensor:
        return reshard([tensor * 2], 1, 2, mesh)[0] + 1

    traced = torch.compile(reshard_between, backend="aot_eager", fullgraph=True)(tensor)
    stages = list(mesh.traffic.calls)
    assert torch.equal(traced, reshard_between(tensor))
    return stages, list(mesh.traffic.calls)


def test_traced_resharding_equals_eager_resharding() -> None:
    for traced, eager in ranks.run(reshard_compiled, 4):
        assert traced == []  # traced calls are not counted, so there was no fallback to eager code
        assert eager


def max_over_all(values: list[float]) -> list[float]:
    maxima = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(maxima, dist.ReduceOp.MAX)
    return maxima.tolist()


def slow_axes_of_groups(rank: int) -> tuple[list[str], list[str]]:
    """Return the slow axes of this rank's profile and those in use; each half of the ranks has another profile."""
    halves = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])]
    speeds = [1e6, 1e12] if rank < 4 else [1e12, 1e12]
    config = CommConfig(topology=MACHINE.topology, slow_axes=None)

    profile = dataclasses.replace(profile_of([2, 2], speeds, latency=1e-3, launch=1e-6), codec_bytes_per_second=1e9)
    setup = comm_setup.set_up_comm(halves[rank // 4], config, CPU, TuningCache({}, profile), max_over_all)
    return list(profile.slow_axes), list(setup.partition.slow_axis_names)


def test_axis_that_is_slow_for_one_ulysses_group_is_slow_for_all() -> None:
    """Ranks of a ring agree on codec statistics by a collective, which every group must call."""
    results = ranks.run(slow_axes_of_groups, 8)
    assert len({str(measured) for measured, _ in results}) == 2
    assert all(used == results[0][1] for _, used in results)


def coding_costs(rank: int) -> list[CodingCost | None]:
    """Return the costs in use where the slow axis is measured and where it is named; each rank has its own profile."""
    profile = profile_of([2, 2], [1e6 * (rank + 1), 1e12], latency=1e-3, launch=1e-6)
    profile = dataclasses.replace(profile, codec_bytes_per_second=1e9, coding_host_seconds=1e-4 * (rank + 1))

    configs = [CommConfig(topology=MACHINE.topology, slow_axes=slow_axes) for slow_axes in (None, ("node",))]
    setups = [
        comm_setup.set_up_comm(dist.group.WORLD, config, CPU, TuningCache({}, profile), max_over_all)
        for config in configs
    ]
    return [setup.partition.coding_cost for setup in setups]


def test_host_time_counts_where_slow_axes_are_measured_and_is_agreed_on() -> None:
    assert ranks.run(coding_costs, 4) == [[CodingCost(1e-6, 4e-4), None]] * 4
