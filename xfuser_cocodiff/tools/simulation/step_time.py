"""Predicts traffic, memory of link references, and step time of each split.

Computation follows the rates of the accelerator. Communication follows the planner's cost model, which also chooses
plans on measured machines. Nothing is measured here.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from xfuser_cocodiff.tools.simulation.communication import LayerCommunication
from xfuser_cocodiff.tools.simulation.layer_time import INSTANT, compute, layer_time
from xfuser_cocodiff.tools.simulation.scenario import STOCK, Scenario
from xfuser_cocodiff.tools.simulation.sharding import ulysses_degrees
from xfuser_cocodiff.xdit.settings.ring_placement import OUTER, PLACEMENTS, UlyssesRingSplit


@dataclass(frozen=True)
class StepEstimate:
    """Predicted step of a split in a mode. Bytes and seconds are those of one rank and step, averaged over a run."""

    split: UlyssesRingSplit
    """Split into Ulysses and ring."""
    mode: str
    """Mode of the plugin, or `stock`."""
    gathered: tuple[str, ...]
    """Axes of a Ulysses group along which most layers gather K and V."""
    is_left_lossless: bool
    """Whether a lossy mode codes nothing, because the host would take longer than the links save."""
    sent_bytes: dict[str, float]
    """Bytes that all-to-alls, and gathers of K and V beside them, send along each axis."""
    ring_bytes: dict[str, float]
    """Bytes that the ring sends along each axis."""
    reference_bytes: int
    """Memory of all link references."""
    a2a_seconds: float
    """Seconds of all all-to-alls and gathers of K and V beside them, hidden ones included."""
    ring_seconds: float
    """Seconds of all all-gathers of the ring, hidden ones included."""
    compute_seconds: float
    """Seconds of computation on the device; 0 if the device is unknown."""
    host_seconds: float
    """Seconds that the host needs for all calls; 0 if the device is unknown."""
    step_seconds: float | None
    """Seconds of a step; None if the device is unknown."""

    @property
    def cost(self) -> float:
        """Seconds by which splits are ranked: of a step, or of communication if computation is unknown."""
        return self.a2a_seconds + self.ring_seconds if self.step_seconds is None else self.step_seconds


def possible_splits(scenario: Scenario, mode: str) -> list[UlyssesRingSplit]:
    """Return all splits whose groups align with the axes of the topology.

    Stock's Ulysses degree must divide the heads, and its ring spans the slowest axis. The plugin zero-pads heads and
    has two placements of the ring.
    """
    degree, is_stock = scenario.topology.size, mode == STOCK
    splits = [
        UlyssesRingSplit(ulysses, degree // ulysses, placement)
        for ulysses in ulysses_degrees(scenario.workload.heads if is_stock else degree, degree)
        for placement in (PLACEMENTS if 1 < ulysses < degree and not is_stock else (OUTER,))
    ]
    return [split for split in splits if split.fits(scenario.topology)]


def rank_splits(scenario: Scenario, mode: str) -> list[StepEstimate]:
    """Return estimates of all splits in a mode of the plugin, or in STOCK, the fastest first."""
    estimates = [estimate_step(scenario, split, mode) for split in possible_splits(scenario, mode)]
    return sorted(estimates, key=lambda estimate: estimate.cost)


def estimate_step(scenario: Scenario, split: UlyssesRingSplit, mode: str) -> StepEstimate:
    """Predict a step of a split in a mode of the plugin, or in stock."""
    costs, accelerator = LayerCommunication(scenario, split, mode), scenario.accelerator or INSTANT
    reshardings = {False: costs.by_heads, True: costs.gather or costs.by_heads}
    totals, sent_bytes, ring_bytes = (Counter[str]() for _ in range(3))
    for payloads, num_steps in Counter(costs.payloads()).items():
        schedules, ring = costs.schedules(payloads), costs.ring_gather(payloads.ring)
        for kind in scenario.workload.kinds:
            weight = scenario.workload.calls * kind.count * num_steps / scenario.steps
            computations = {
                gathers: compute(scenario, kind, each.padded_heads, split.ring, each.num_gathered)
                for gathers, each in reshardings.items()
            }
            times = [
                layer_time(computations[each.gathers_kv], each, ring, split.ring, accelerator, overlaps=mode != STOCK)
                for each in schedules
            ]
            time, schedule = min(zip(times, schedules, strict=True), key=lambda pair: pair[0].seconds)
            for message in schedule.messages:
                sent_bytes.update(_weighted(message.sent_bytes, weight))
            ring_bytes.update(_weighted(ring.sent_bytes, weight))
            seconds = {
                "a2a_seconds": sum(message.seconds for message in schedule.messages),
                "ring_seconds": ring.seconds,
                "compute_seconds": computations[schedule.gathers_kv].device,
                "host_seconds": time.host,
                "step_seconds": time.seconds,
                "gathering": schedule.gathers_kv,
            }
            totals.update(_weighted(seconds, weight))
    gathers_most = totals.pop("gathering") > scenario.layer_calls / 2
    estimate = StepEstimate(
        split=split,
        mode=mode,
        gathered=costs.gather.gathered if costs.gather and gathers_most else (),
        is_left_lossless=costs.is_left_lossless,
        sent_bytes=dict(sent_bytes),
        ring_bytes=dict(ring_bytes),
        reference_bytes=scenario.workload.layers * sum(call.predicted for call in costs.references()),
        **totals,
    )
    return estimate if scenario.accelerator else replace(estimate, step_seconds=None)


def _weighted(figures: Mapping[str, float], weight: float) -> Any:
    return {name: weight * value for name, value in figures.items()}
