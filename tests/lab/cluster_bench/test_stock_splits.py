"""Candidates of best stock."""

import pytest

from xfuser_cocodiff.lab.cluster_bench import stock_splits, variants
from xfuser_cocodiff.lab.cluster_bench.cell import Cell
from xfuser_cocodiff.lab.simulation.machines import MACHINES
from xfuser_cocodiff.lab.simulation.scenario import STOCK, Scenario
from xfuser_cocodiff.lab.simulation.simulate import scenario_on_nodes
from xfuser_cocodiff.lab.simulation.step_time import rank_splits
from xfuser_cocodiff.lab.simulation.workloads import WORKLOADS
from xfuser_cocodiff.xdit.settings.ring_placement import OUTER, UlyssesRingSplit


def scenario(machine: str, nodes: int, model: str) -> Scenario:
    return scenario_on_nodes(MACHINES[machine], nodes, WORKLOADS[model], 1536)


@pytest.mark.parametrize(
    ("machine", "nodes", "model", "degrees"),
    [
        ("aurora", 2, "flux.1-dev", {1, 2, 3, 4, 6, 8, 12, 24}),
        ("aurora", 1, "flux.1-dev", {1, 2, 3, 4, 6, 12}),
        ("aurora", 2, "sd3.5-large", {1, 2}),  # 38 heads
        ("dgx-h100", 2, "qwen-image", {1, 2, 4, 8}),  # 24 heads are not divisible by 16
    ],
)
def test_every_split_that_the_heads_allow_is_listed(machine: str, nodes: int, model: str, degrees: set[int]) -> None:
    given = scenario(machine, nodes, model)
    ranked = stock_splits.rank_stock_splits(given)
    world = given.topology.size
    assert all(each.split.ulysses * each.split.ring == world for each in ranked)
    assert sorted(each.split.ulysses for each in ranked) == sorted(degrees)
    assert {each.split.placement for each in ranked} == {OUTER}  # the only one that xDiT has


@pytest.mark.parametrize("machine", MACHINES)
def test_the_order_is_that_of_the_simulator(machine: str) -> None:
    given = scenario(machine, 2, "flux.1-dev")
    ranked = stock_splits.rank_stock_splits(given)
    assert [each.estimate for each in ranked if each.estimate] == rank_splits(given, STOCK)
    assert ranked[0].slowdown == 1 and ranked[0].estimate
    fastest = min(each.estimate.cost for each in ranked if each.estimate)
    assert all(each.slowdown == each.estimate.cost / fastest for each in ranked if each.estimate)
    assert [each.slowdown for each in ranked] == sorted(each.slowdown for each in ranked)


def test_only_near_splits_are_measured() -> None:
    ranked = stock_splits.rank_stock_splits(scenario("ethernet-100", 2, "flux.1-dev"))
    measured, simulated = stock_splits.divide(ranked)
    assert [*measured, *simulated] == ranked
    assert measured[0].split == UlyssesRingSplit(8, 2)  # Ulysses within nodes: K and V cross once
    assert UlyssesRingSplit(1, 16) in [each.split for each in simulated]
    assert max(each.slowdown for each in measured) <= 1.3 < min(each.slowdown for each in simulated)


def test_a_split_that_xdit_lacks_keeps_none_from_being_measured() -> None:
    """On one Aurora node a ring within GPUs would have a speedup of 1.7x over any split of xDiT's."""
    cell = Cell(MACHINES["aurora"], 1, "flux.1-dev", 1536)
    measured = {each.split for each in variants.parse(cell, [variants.BEST_STOCK]) if each.is_stock}
    assert {UlyssesRingSplit(12, 1), UlyssesRingSplit(6, 2)} <= measured


def test_groups_across_the_axes_are_judged_by_their_neighbors() -> None:
    ranked = stock_splits.rank_stock_splits(scenario("aurora", 2, "flux.1-dev"))
    slowdown = {each.split.ulysses: each.slowdown for each in ranked}
    unaligned = {each.split.ulysses for each in ranked if each.estimate is None}
    assert unaligned == {3, 8}  # of twelve tiles a node, two a GPU
    assert slowdown[8] == min(slowdown[6], slowdown[12])
    assert slowdown[3] == min(slowdown[2], slowdown[4])
