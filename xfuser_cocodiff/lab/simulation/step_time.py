"""Predicts traffic, memory of link references, and step time of each split.

Computation follows the rates of the accelerator. Communication follows the planner's cost model, which also chooses
plans on measured machines. Nothing is measured here.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from xfuser_cocodiff.engine.compression.mode_names import default_mode
from xfuser_cocodiff.lab.simulation import exchange
from xfuser_cocodiff.lab.simulation.communication import LayerCommunication
from xfuser_cocodiff.lab.simulation.layer_time import INSTANT, Computation, compute, layer_time
from xfuser_cocodiff.lab.simulation.layers import LayerKind
from xfuser_cocodiff.lab.simulation.scenario import STOCK, Scenario
from xfuser_cocodiff.lab.simulation.sharding import ulysses_degrees
from xfuser_cocodiff.xdit.settings.ring_placement import OUTER, PLACEMENTS, UlyssesRingSplit, spans_nodes


@dataclass(frozen=True)
class StepEstimate:
    """Predicted step of a split in a mode. Bytes and seconds are those of one rank and step, averaged over a run."""

    ulysses: int
    """Ulysses degree."""
    ring: int
    """Ring degree."""
    placement: str
    """Placement of the ring."""
    topology: str
    """Topology of a Ulysses group."""
    mode: str
    """Mode of the plugin, or `stock`."""
    exchange: dict[str, str]
    """How attention of most layers crosses each axis of a Ulysses group: plans.HEADS or plans.KV."""
    exchange_reason: str
    """Why that is so along the slow axes; empty where nothing speaks for a gather."""
    sent_bytes: dict[str, float]
    """Bytes that all-to-alls, and gathers of K and V beside them, send along each axis."""
    ring_bytes: dict[str, float]
    """Bytes that the ring sends along each axis."""
    reference_bytes: int
    """Memory of all link references."""
    compact_reference_bytes: int
    """Memory of all link references without prediction."""
    a2a_seconds: float
    """Seconds of all all-to-alls and gathers of K and V beside them, hidden ones included."""
    ring_seconds: float
    """Seconds of all all-gathers of the ring, hidden ones included."""
    compute_seconds: float | None
    """Seconds of computation on the device; None if the device is unknown."""
    host_seconds: float | None
    """Seconds that the host needs for all calls; None if the device is unknown."""
    step_seconds: float | None
    """Seconds of a step; None if the device is unknown."""

    @property
    def split(self) -> UlyssesRingSplit:
        """Split into Ulysses and ring."""
        return UlyssesRingSplit(self.ulysses, self.ring, self.placement)

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


def rank_splits(scenario: Scenario, mode: str | None) -> list[StepEstimate]:
    """Return estimates of all splits, the fastest first.

    Args:
        scenario: model and ranks.
        mode: mode of the plugin, or STOCK; None for the default mode.
    """
    mode = mode or default_mode(spans_nodes(scenario.topology))
    estimates = [estimate_step(scenario, split, mode) for split in possible_splits(scenario, mode)]
    return sorted(estimates, key=lambda estimate: estimate.cost)


def estimate_step(scenario: Scenario, split: UlyssesRingSplit, mode: str) -> StepEstimate:
    """Predict a step of a split in a mode of the plugin, or in stock."""
    costs, accelerator = LayerCommunication(scenario, split, mode), scenario.accelerator or INSTANT
    overlaps = mode != STOCK
    sent_bytes: defaultdict[str, float] = defaultdict(float)
    ring_bytes: defaultdict[str, float] = defaultdict(float)
    a2a_seconds = ring_seconds = compute_seconds = host_seconds = step_seconds = 0.0
    computations = [_computations(scenario, costs, kind, split.ring) for kind in scenario.workload.kinds]
    gathering = 0.0
    for payloads, num_steps in Counter(costs.payloads()).items():
        schedules, gather = costs.schedules(payloads), costs.ring_gather(payloads.ring)
        for kind, computation_of in zip(scenario.workload.kinds, computations, strict=True):
            weight = scenario.workload.calls * kind.count * num_steps / scenario.steps
            times = [
                layer_time(computation_of[each.gathers_kv], each, gather, split.ring, accelerator, overlaps)
                for each in schedules
            ]
            time, schedule = min(zip(times, schedules, strict=True), key=lambda pair: pair[0].seconds)
            computation, gathering = computation_of[schedule.gathers_kv], gathering + weight * schedule.gathers_kv
            for message in schedule.messages:
                _add_weighted(sent_bytes, message.sent_bytes, weight)
                a2a_seconds += weight * message.seconds
            _add_weighted(ring_bytes, gather.sent_bytes, weight)
            ring_seconds += weight * gather.seconds
            compute_seconds += weight * computation.device
            host_seconds += weight * time.host
            step_seconds += weight * time.seconds
    is_known = scenario.accelerator is not None
    gathered = costs.gather.axes if costs.gather and gathering > scenario.layer_calls / 2 else ()
    return StepEstimate(
        ulysses=split.ulysses,
        ring=split.ring,
        placement=split.placement,
        topology=str(costs.group),
        mode=mode,
        exchange=exchange.by_axis(costs.group, gathered),
        exchange_reason=costs.exchange_reason(gathered),
        sent_bytes=dict(sent_bytes),
        ring_bytes=dict(ring_bytes),
        reference_bytes=costs.reference_bytes.predicted * scenario.workload.layers,
        compact_reference_bytes=costs.reference_bytes.single * scenario.workload.layers,
        a2a_seconds=a2a_seconds,
        ring_seconds=ring_seconds,
        compute_seconds=compute_seconds if is_known else None,
        host_seconds=host_seconds if is_known else None,
        step_seconds=step_seconds if is_known else None,
    )


def _computations(scenario: Scenario, costs: LayerCommunication, kind: LayerKind, ring: int) -> dict[bool, Computation]:
    """Return the computation of a layer, by whether K and V are gathered."""
    by_exchange = {False: compute(scenario, kind, costs.padded_heads, ring)}
    if costs.gather:
        by_exchange[True] = compute(scenario, kind, costs.gather.padded_heads, ring, costs.gather.num_slow)
    return by_exchange


def _add_weighted(total: defaultdict[str, float], by_axis: Mapping[str, float], weight: float) -> None:
    for axis, count in by_axis.items():
        total[axis] += weight * count
