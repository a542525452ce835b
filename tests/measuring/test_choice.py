"""Which plan an exchange goes by: the model's choice, confirmed by a trial, the same on every rank."""

import dataclasses
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.machine.test_planner import profile_of
from xfuser_cocodiff.attention.reshard import reshard
from xfuser_cocodiff.exchange.mesh import Mesh
from xfuser_cocodiff.exchange.policy import Policy
from xfuser_cocodiff.machine import planner
from xfuser_cocodiff.machine.plan import Plan
from xfuser_cocodiff.machine.profile import Profile
from xfuser_cocodiff.measuring import choice, plan_trial, planned, stopwatch
from xfuser_cocodiff.measuring.findings import Findings
from xfuser_cocodiff.settings.config import MEASURED, CocoDiffConfig

CPU = torch.device("cpu")
# A collective costs next to nothing to start and each message a lot, so that small messages go by axis.
MACHINE = profile_of([2, 2], [1e8, 1e8], latency=1e-3, launch=1e-6)


def choose(rank: int, machine: Profile, times: list[float] | None, sizes: list[int]) -> tuple[list[str], int]:
    """Choices after trials in which a call takes what `times` say, for flat and the others in turn; and trials made."""
    races = 0

    def timed(works: list, calls: int, rounds: int, *_) -> list[list[float]]:
        nonlocal races
        races += rounds > 1  # the first race only warms up
        for work in works:
            work()
        return [[seconds] * rounds for seconds in times]

    mesh, plans = Mesh.over(dist.group.WORLD, machine.topology), choice.Plans(machine.topology, machine)
    before = [plans(size) for size in sizes]
    assert before == [planner.choose(machine, 1 << round(math.log2(size))) for size in sizes] and races == 0
    with mock.patch.object(plan_trial, "race", timed) if times else mock.MagicMock():
        while plans.open:
            size = plans.open[0]
            effort, others = plan_trial.EFFORTS[-1], plans.contenders(size)
            plans.settled[size] = plan_trial.tried(mesh, others, size, effort, dist.group.WORLD, CPU)
    assert not mesh.traffic.calls  # trials are not the user's traffic
    return [str(plans(size)) for size in sizes], races


def test_small_messages_are_tried_by_axis() -> None:
    assert [str(plan) for plan in plan_trial.contenders(MACHINE, 1000)] == ["hierarchical:gpu,node"]


@pytest.mark.parametrize(
    ("times", "expected"),
    [([1.0, 0.85], "hierarchical:gpu,node"), ([1.0, 0.9], "flat"), ([1.0, 1.5], "flat")],
)
def test_a_trial_decides_once_for_each_size(times: list[float], expected: str) -> None:
    found, races = ranks.run(choose, 4, MACHINE, times, [1000, 1000, 2000, 1000])[0]
    assert found == [expected] * 4
    assert races == 2  # one for each size


def settle(rank: int, machine: Profile, times: list[float]) -> str:
    """The plan of a trial in which calls of flat, flat by direct sends and one along the axes take so long."""
    along = Plan.hierarchical(machine.topology)
    others = [Plan.parse("flat*", machine.topology), along]
    mesh = Mesh.over(dist.group.WORLD, machine.topology, [Plan.flat(machine.topology), *others])
    with mock.patch.object(plan_trial, "race", lambda works, *_: [[seconds] for seconds in times]):
        return str(plan_trial.tried(mesh, others, 4096, plan_trial.EFFORTS[0], dist.group.WORLD, CPU))


def test_of_plans_that_take_as_long_the_one_with_fewer_stages_is_taken() -> None:
    assert set(ranks.run(settle, 4, MACHINE, [1.0, 0.8, 0.75])) == {"flat*"}
    assert set(ranks.run(settle, 4, MACHINE, [1.0, 0.8, 0.7])) == {"hierarchical:gpu,node"}


XPU = torch.device("xpu", 0)


def test_direct_sends_are_for_the_cpu() -> None:
    machine = dataclasses.replace(MACHINE, direct=MACHINE)
    assert planned.known_of(machine, CPU).direct == MACHINE
    assert planned.known_of(machine, XPU).direct is None
    direct = Plan.parse("hierarchical:gpu*,node", machine.topology)
    planned.check_fits(direct, CPU, "--cocodiff_a2a")
    planned.check_fits(Plan.flat(machine.topology), XPU, "--cocodiff_a2a")
    with pytest.raises(ValueError, match=r"--cocodiff_a2a: 'hierarchical:gpu\*,node' .*valid on xpu are plans without"):
        planned.check_fits(direct, XPU, "--cocodiff_a2a")


def test_collectives_that_are_known_to_block_hide_nothing() -> None:
    machine = dataclasses.replace(MACHINE, overlap=0.9)
    assert planned.known_of(machine, XPU).hides == 0.9
    assert planned.known_of(machine, XPU, synchronous=True).hides == 0
    assert planned.known_of(machine, CPU, synchronous=True).hides == 0.9  # the variable is oneCCL's
    for synchronous in (False, True):
        ahead = planned.sends_ahead(None, lambda size: Plan.flat(machine.topology), synchronous)
        assert ahead(1, 3) is not synchronous


def test_sizes_are_tried_once_those_first_that_send_most() -> None:
    plans = choice.Plans(MACHINE.topology, MACHINE)
    for size in (1000, 4000, 1100, 900, 900, 900):  # of which five are nearest to one power of two
        plans(size)
    assert plans.open == [1024, 4096]
    assert (plans.message(1024), plans.message(4096), plans.message(2048)) == (900, 4000, 2048)
    plans.settled[1024] = Plan.flat(MACHINE.topology)
    plans.leave(4096)
    assert plans.open == []
    assert plans(1000) == Plan.flat(MACHINE.topology) != plans(4000) == planner.choose(MACHINE, 4096)
    by_profile = choice.Plans(MACHINE.topology, MACHINE, is_tried=False)
    by_profile(1000)
    assert by_profile.open == []


def test_graphs_know_the_plan_of_every_size() -> None:
    plans = choice.Plans(MACHINE.topology, profile_of([2, 2], [1e8, 1e6], latency=1e-3, launch=1e-6))
    policy = Policy(plans, plans.table())
    sizes = [64, 1000, 2**15, 10**5, 10**6, 10**7, 2**33, 2**50]
    with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
        traced = [policy.plan_for(size) for size in sizes]
    assert traced == [plans(size) for size in sizes] and len(set(traced)) > 1
    assert len(policy.traced) == len(set(policy.traced)) < len(choice.SIZES)


def test_real_trials_end_alike_on_all_ranks() -> None:
    results = ranks.run(choose, 4, MACHINE, None, [64, 4096, 10**6])
    assert all(result == results[0] for result in results)


def test_contenders_are_few_and_worth_it() -> None:
    machine = profile_of([4, 3, 2], [1e7, 1e7, 1e7], latency=1e-4, launch=1e-5)
    for size in (100, 10**4, 10**6):
        best = min(planner.seconds(machine, plan, size) for plan, _ in planner.ranking(machine, size))
        found = plan_trial.contenders(machine, size)
        assert len(found) <= plan_trial.CONTENDERS
        assert Plan.flat(machine.topology) not in found
        assert len({frozenset(plan.stages) for plan in found}) == len(found)
        for plan in found:
            assert planner.seconds(machine, plan, size) <= 1.5 * best


def test_flat_by_direct_sends_is_always_tried() -> None:
    slow = profile_of([2, 2], [1e3, 1e3], latency=1.0, launch=1.0)
    assert "flat*" in [str(plan) for plan in plan_trial.contenders(dataclasses.replace(MACHINE, direct=slow), 1000)]


def test_several_stages_send_directly_where_that_beats_the_flat_collective() -> None:
    """Of 3 ms, even though the model prefers collectives along the axes, of 2 ms."""
    for latency, expected in ((1.4e-3, "hierarchical:gpu*,node*"), (1.6e-3, "hierarchical:gpu,node")):
        direct = profile_of([2, 2], [1e8, 1e8], latency=latency, launch=1e-6)
        found = [str(plan) for plan in plan_trial.contenders(dataclasses.replace(MACHINE, direct=direct), 1000)]
        assert found == ["flat*", expected]


def test_many_ranks_are_timed_for_longer() -> None:
    assert [stopwatch.in_a_row(3, ranks) for ranks in (1, 8, 15, 16, 24, 96)] == [3, 3, 3, 6, 9, 12]


def exchange_compiled(rank: int) -> tuple[list[str], list[str]]:
    """Stages that eager and traced exchanges of one size went through, once they were found equal."""
    plans = choice.Plans(MACHINE.topology, MACHINE)
    mesh = Mesh.over(dist.group.WORLD, MACHINE.topology)
    mesh = dataclasses.replace(mesh, policy=Policy(plans, plans.table()))
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
    config = CocoDiffConfig(topology=MACHINE.topology, mode="balanced", slow_axes=MEASURED)

    def largest(values: list[float]) -> list[float]:
        everybody = torch.tensor(values)
        dist.all_reduce(everybody, dist.ReduceOp.MAX)
        return everybody.tolist()

    profile = dataclasses.replace(profile_of([2, 2], speeds, latency=1e-3, launch=1e-6), codec_bytes_per_second=1e9)
    way = planned.planned_mesh(halves[rank // 4], config, CPU, Findings({}, profile), largest).way
    return list(profile.slow_axes), [way.slow_dims, way.places]


def test_an_axis_that_is_slow_for_one_ulysses_group_is_slow_for_all() -> None:
    """Ranks of a ring agree on what codecs did: a group without them would not come."""
    found = ranks.run(other_slow_axes, 8)
    assert len({str(alone) for alone, _ in found}) == 2
    assert all(way == found[0][1] for _, way in found)


def ways(rank: int) -> list[list[bool]]:
    """Whether small and large coded exchanges take all axes at once, where plans are found and where one is given."""
    profile = profile_of([2, 2], [1e6, 1e7], latency=1e-3, launch=1e-4)
    found = []
    for plan in (None, Plan.hierarchical(profile.topology)):
        config = CocoDiffConfig(topology=profile.topology, mode="balanced", slow_axes=("node",), plan=plan)
        way = planned.planned_mesh(dist.group.WORLD, config, CPU, Findings({}, profile)).way
        found.append([way.goes_at_once(size) for size in (1000, 1_000_000)])
    return found


def test_coded_exchanges_take_the_way_that_the_planner_finds_faster() -> None:
    assert ranks.run(ways, 4) == [[[False, True], [False, False]]] * 4
