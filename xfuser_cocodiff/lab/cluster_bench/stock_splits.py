"""Candidates of best stock: every Ulysses x Ring split, and which of them are worth measuring."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xfuser_cocodiff.lab.simulation.scenario import STOCK, Scenario
from xfuser_cocodiff.lab.simulation.sharding import ulysses_degrees
from xfuser_cocodiff.lab.simulation.step_time import StepEstimate, estimate_step
from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit

LARGEST_SLOWDOWN = 1.3
"""Simulated step time over the best one up to which a split is measured. The simulator is asked to be within 10 % of
the benchmark, so that the fastest split has to be far inside."""


@dataclass(frozen=True)
class StockSplit:
    """Split of stock xDiT with its simulated step."""

    split: UlyssesRingSplit
    """Degrees; xDiT has Ulysses among neighbors and the ring across."""
    estimate: StepEstimate | None
    """Simulated step; None if the groups do not align with the axes of the machine."""
    slowdown: float
    """Simulated step time over that of the fastest split. Of a split that does not align, the lower one of the next
    smaller and the next larger Ulysses degree: it lies between them (assumed)."""

    @property
    def is_worth_measuring(self) -> bool:
        """Whether it may be the fastest; others stay simulated."""
        return self.slowdown <= LARGEST_SLOWDOWN

    def __str__(self) -> str:
        return f"Ulysses {self.split.ulysses} x Ring {self.split.ring}"


def rank_stock_splits(scenario: Scenario) -> list[StockSplit]:
    """Return all splits that the model's heads and xDiT allow, the fastest simulated one first.

    Args:
        scenario: model, input size and ranks. xDiT may be unable to run it at all, see `scenario.shard.problem`.
    """
    degree = scenario.topology.size
    estimates: dict[UlyssesRingSplit, StepEstimate | None] = {}
    for ulysses in ulysses_degrees(scenario.workload.heads, degree):
        split = UlyssesRingSplit(ulysses, degree // ulysses)
        estimates[split] = estimate_step(scenario, split, STOCK) if split.fits(scenario.topology) else None
    costs = {split: estimate.cost for split, estimate in estimates.items() if estimate}
    best = min(costs.values())
    splits = [
        StockSplit(split, estimate, (estimate.cost if estimate else _neighboring_cost(split, costs)) / best)
        for split, estimate in estimates.items()
    ]
    return sorted(splits, key=lambda split: (split.slowdown, split.estimate is None))


def divide(splits: Iterable[StockSplit]) -> tuple[Sequence[StockSplit], Sequence[StockSplit]]:
    """Return the splits worth measuring, and the slower ones that stay simulated."""
    measured: list[StockSplit] = []
    simulated: list[StockSplit] = []
    for each in splits:
        (measured if each.is_worth_measuring else simulated).append(each)
    return measured, simulated


def _neighboring_cost(split: UlyssesRingSplit, costs: dict[UlyssesRingSplit, float]) -> float:
    """Return the lower cost of the aligned splits with the next smaller and the next larger Ulysses degree."""
    smaller = [each for each in costs if each.ulysses < split.ulysses]
    larger = [each for each in costs if each.ulysses > split.ulysses]
    nearest = [
        *([max(smaller, key=lambda each: each.ulysses)] if smaller else []),
        *([min(larger, key=lambda each: each.ulysses)] if larger else []),
    ]
    return min(costs[each] for each in nearest)
