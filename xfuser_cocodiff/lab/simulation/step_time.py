"""Predicts a denoising step of a full-size model: traffic, memory of link references, and step time of each split.

Computation is FLOPs divided by the achieved FLOP/s. Communication follows the planner's cost model, which also chooses
plans on measured machines. Nothing is measured here.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes, ReferenceBytes
from xfuser_cocodiff.engine.settings.config import default_mode, parse_slow_axes
from xfuser_cocodiff.engine.settings.ring_placement import OUTER, PLACEMENTS, UlyssesRingSplit
from xfuser_cocodiff.engine.topology import planner
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.simulation.sharding import TokenShard, shard, ulysses_degrees
from xfuser_cocodiff.lab.simulation.workloads import BYTES_PER_VALUE, Workload

STOCK = "stock"
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Scenario:
    """A model, its input size and the ranks that share its sequence."""

    workload: Workload
    resolution: int
    """Pixels per side."""
    batch: int
    """Number of images."""
    steps: int
    """Number of denoising steps."""
    topology: Topology
    """Topology of all ranks."""
    link_profile: Callable[[Topology, float], Profile]
    """Returns the link profile of some axes for messages of so many bytes per rank."""
    flops: float | None
    """Achieved FLOP/s of a rank; None if unknown."""

    @property
    def shard(self) -> TokenShard:
        """Tokens of one rank."""
        return shard(self.workload, self.resolution, self.topology.size)

    @property
    def layer_calls(self) -> int:
        """Number of layers of a step, counted once for each call of guidance."""
        return self.workload.layers * self.workload.calls

    @property
    def rows(self) -> int:
        """Number of batch rows in a call."""
        return self.batch * self.workload.rows_per_image

    @property
    def slow_axes(self) -> tuple[str, ...]:
        """Axes on which modes compress without --cocodiff_slow_axes."""
        return parse_slow_axes("", self.topology, None)

    def message_bytes(self, name: str) -> int:
        """Return the bytes per rank of one of q, k, v and o."""
        return self.rows * self.shard.num_tokens(name) * self.workload.width * BYTES_PER_VALUE


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
    sent_bytes: dict[str, float]
    """Bytes that all-to-alls send along each axis."""
    ring_bytes: dict[str, float]
    """Bytes that the ring sends along each axis."""
    reference_bytes: int
    """Memory of all link references."""
    compact_reference_bytes: int
    """Memory of all link references in 8 bits."""
    a2a_seconds: float
    ring_seconds: float
    compute_seconds: float | None
    """Seconds of computation; None if the FLOP/s of a rank are unknown."""
    step_seconds: float | None
    """Seconds of a step; None if the FLOP/s of a rank are unknown."""

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
    mode = mode or default_mode(scenario.topology)
    estimates = [estimate_step(scenario, split, mode) for split in possible_splits(scenario, mode)]
    return sorted(estimates, key=lambda estimate: estimate.cost)


def estimate_step(scenario: Scenario, split: UlyssesRingSplit, mode: str) -> StepEstimate:
    """Predict a step of a split in a mode of the plugin, or in stock."""
    costs, workload, layer_calls = _LayerCosts(scenario, split, mode), scenario.workload, scenario.layer_calls
    sent_bytes: defaultdict[str, float] = defaultdict(float)
    ring_bytes: defaultdict[str, float] = defaultdict(float)
    a2a_seconds = ring_seconds = step_seconds = 0.0
    projection, attention = costs.compute_seconds
    for payloads, num_steps in Counter(costs.payloads()).items():
        weight = layer_calls * num_steps / scenario.steps
        all_to_alls = {name: costs.all_to_all(name, payloads) for name in "qkvo"}
        gather = costs.ring_gather(payloads.ring)
        for each in all_to_alls.values():
            _add_weighted(sent_bytes, each.sent_bytes, weight)
        _add_weighted(ring_bytes, gather.sent_bytes, weight)
        seconds = {name: each.seconds for name, each in all_to_alls.items()}
        a2a_seconds += weight * sum(seconds.values())
        ring_seconds += weight * gather.seconds
        step_seconds += weight * layer_seconds(
            projection, workload.mlp_projections, attention, seconds, split.ring, gather.seconds, mode != STOCK
        )
    has_flops = scenario.flops is not None
    compute_seconds = layer_calls * ((4 + workload.mlp_projections) * projection + attention)
    return StepEstimate(
        ulysses=split.ulysses,
        ring=split.ring,
        placement=split.placement,
        topology=str(costs.group),
        mode=mode,
        sent_bytes=dict(sent_bytes),
        ring_bytes=dict(ring_bytes),
        reference_bytes=costs.reference_bytes.full * layer_calls,
        compact_reference_bytes=costs.reference_bytes.int8 * layer_calls,
        a2a_seconds=a2a_seconds,
        ring_seconds=ring_seconds,
        compute_seconds=compute_seconds if has_flops else None,
        step_seconds=step_seconds if has_flops else None,
    )


def _add_weighted(total: defaultdict[str, float], by_axis: Mapping[str, float], weight: float) -> None:
    for axis, count in by_axis.items():
        total[axis] += weight * count


def layer_seconds(
    projection: float,
    mlp_projections: float,
    attention: float,
    all_to_alls: Mapping[str, float],
    ring: int,
    ring_seconds: float,
    v_first: bool,
) -> float:
    """Return the seconds of a layer: computation plus exposed communication.

    Stock projects Q, K and V and then waits for all of their all-to-alls. Only its ring overlaps, with attention to a
    rank's own K and V. V-First also overlaps V's all-to-all with the projections of Q and K.

    Args:
        projection: seconds of one projection from width to width.
        mlp_projections: cost of the MLP, in such projections.
        attention: seconds of attention.
        all_to_alls: seconds of the all-to-alls of q, k, v and o.
        ring: ring degree.
        ring_seconds: seconds until K and V of all ranks of the ring have arrived.
        v_first: whether V's all-to-all starts before Q and K are projected.
    """
    hidden = min(attention / ring, ring_seconds) + (min(2 * projection, all_to_alls["v"]) if v_first else 0.0)
    return (4 + mlp_projections) * projection + attention + sum(all_to_alls.values()) + ring_seconds - hidden


class _Payloads(NamedTuple):
    """Encoded bytes per rank that one layer sends on slow axes in a step; None where nothing is encoded.

    Q, K and V share one message.
    """

    qkv: int | None
    o: int | None
    ring: int | None


class _CollectiveCost(NamedTuple):
    """Seconds of a collective, and bytes that a rank sends along each axis."""

    seconds: float
    sent_bytes: Mapping[str, float]


class _LayerCosts:
    """Costs of one layer on one rank, for a split in a mode."""

    def __init__(self, scenario: Scenario, split: UlyssesRingSplit, mode: str) -> None:
        self._scenario, self._split, self._is_stock = scenario, split, mode == STOCK
        self._heads = -(-scenario.workload.heads // split.ulysses)
        """Heads of a rank, including zero-padded heads."""
        self.group, self.ring = split.ulysses_topology(scenario.topology), split.ring_topology(scenario.topology)
        self._schedule = None if self._is_stock else modes.preset(mode, scenario.steps)
        self._num_slots, self._num_ring_slots = (
            planner.num_ranks_along(topology, scenario.slow_axes) for topology in (self.group, self.ring)
        )
        # Staged or single-stage is chosen once per layer, for a message of two tensors: the mean of its two messages.
        message = sum(self._tensor_bytes(name) for name in "qkvo") // 2
        self._single_stage = self._num_slots > 1 and planner.is_single_stage(
            scenario.link_profile(self.group, message), message, scenario.slow_axes
        )

    def _tensor_bytes(self, name: str) -> int:
        """Return the bytes per rank of one of q, k, v and o, including zero-padded heads."""
        padded_heads = self._heads * self._split.ulysses
        return self._scenario.message_bytes(name) * padded_heads // self._scenario.workload.heads

    @property
    def compute_seconds(self) -> tuple[float, float]:
        """Seconds of one projection and of attention; zeros if the FLOP/s of a rank are unknown."""
        scenario, workload = self._scenario, self._scenario.workload
        if scenario.flops is None:
            return 0.0, 0.0
        tokens = scenario.rows * scenario.shard.queries
        attention = workload.attention_flops(tokens, scenario.shard.attended, self._heads * self._split.ulysses)
        return workload.projection_flops(tokens) / scenario.flops, attention / scenario.flops

    @property
    def reference_bytes(self) -> ReferenceBytes:
        """Memory of the link references of the layer."""
        if self._schedule is None:
            return ReferenceBytes(0, 0)
        num_values = {name: self._tensor_bytes(name) // BYTES_PER_VALUE for name in "qkvo"}
        head_dim = self._scenario.workload.head_dim
        sizes = LayerSizes(sum(num_values.values()), num_values["v"], head_dim, BYTES_PER_VALUE)
        return ReferenceBytes.of(sizes, self._schedule, self._num_slots, self._num_ring_slots)

    def payloads(self) -> list[_Payloads]:
        """Return the encoded bytes of each step of a run."""
        num_links = self._split.ulysses if self._single_stage else self._num_slots
        groups, shard = self._split.ulysses // num_links, self._scenario.shard
        columns = [
            self._encoded_bytes(self._num_slots, "qkv", groups, [shard.num_tokens(name) for name in "qkv"], num_links),
            self._encoded_bytes(self._num_slots, "o", groups, [shard.num_tokens("o")], num_links),
            self._encoded_bytes(self._num_ring_slots, "kv", 1, [self._split.ulysses * shard.keys] * 2, 1),
        ]
        return [_Payloads(*sizes) for sizes in zip(*columns, strict=True)]

    def _encoded_bytes(
        self, num_slots: int, names: str, groups: int, tokens: list[int], num_links: int
    ) -> list[int | None]:
        """Return the encoded bytes of some tensors for each step; None where they are not encoded.

        Args:
            num_slots: number of positions on slow axes; nothing is encoded for one.
            names: names of the tensors, letters of "qkvo".
            groups: groups of tokens that a link carries.
            tokens: tokens per group of each tensor.
            num_links: number of links.
        """
        scenario = self._scenario
        if self._schedule is None or num_slots == 1:
            return [None] * scenario.steps
        head_dim = scenario.workload.head_dim
        shapes = [(1, groups * scenario.rows, self._heads, count, head_dim) for count in tokens]
        return [num_links * size for size in self._schedule.sent_bytes(names, shapes, _DTYPE, scenario.steps)]

    def all_to_all(self, name: str, payloads: _Payloads) -> _CollectiveCost:
        """Return the cost of the all-to-all of one of q, k, v and o."""
        if self._split.ulysses == 1:
            return _CollectiveCost(0.0, {})
        size = self._tensor_bytes(name)
        profile = self._scenario.link_profile(self.group, size)
        if self._is_stock:
            flat = Plan.flat(self.group)
            return _CollectiveCost(planner.all_to_all_seconds(profile, flat, size), flat.sent_bytes(size))
        payload: float | None = payloads.o
        if name != "o":
            payload = None if payloads.qkv is None else payloads.qkv / 3
        arguments = profile, size, payload, self._single_stage, self._scenario.slow_axes
        sent_bytes = Counter[str]()
        for stage in planner.comm_stages(*arguments):
            sent_bytes.update(stage.plan.sent_bytes(stage.message_bytes))
        return _CollectiveCost(planner.coded_all_to_all_seconds(*arguments), sent_bytes)

    def ring_gather(self, payload: int | None) -> _CollectiveCost:
        """Return the cost of the all-gather of K and V in a ring, given the encoded bytes of a block."""
        if self._split.ring == 1:
            return _CollectiveCost(0.0, {})
        block = 2 * self._tensor_bytes("k")
        profile = self._scenario.link_profile(self.ring, self._split.ring * block)
        if self._is_stock:
            flat = Plan.flat(self.ring)
            return _CollectiveCost(planner.gather_seconds(profile, flat, block), flat.gathered_bytes(block))
        arguments = profile, block, payload, self._scenario.slow_axes
        sent_bytes = Counter[str]()
        for stage in planner.ring_stages(*arguments):
            sent_bytes.update(stage.plan.gathered_bytes(stage.message_bytes))
        return _CollectiveCost(planner.ring_seconds(*arguments), sent_bytes)
