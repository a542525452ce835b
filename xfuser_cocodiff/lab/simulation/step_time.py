"""Predicts a step of a model of real size: what each split of a degree into Ulysses and Ring sends along which axis,
what references take, and how long a step lasts.

Computation is FLOPs over what a rank reaches, communication is the planner's cost model, which also chooses plans on a
measured machine. Nothing is measured here.
"""

from collections import Counter
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
from xfuser_cocodiff.lab.simulation.sharding import Shard, shard, ulysses_degrees
from xfuser_cocodiff.lab.simulation.workloads import BYTES_PER_VALUE, Workload

STOCK = "stock"
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A model on the ranks that share its sequence."""

    workload: Workload
    resolution: int
    batch: int
    steps: int
    topology: Topology
    """Of all ranks."""
    profile_of: Callable[[Topology, float], Profile]
    """Return what is known of some of its axes, given what a rank holds before an all-to-all."""
    flops: float | None
    """FLOP/s that a rank reaches; None where unknown."""

    @property
    def shard(self) -> Shard:
        """What a rank has of the tokens."""
        return shard(self.workload, self.resolution, self.topology.size)

    @property
    def layer_calls(self) -> int:
        """Layers of a step, counted once for each call of guidance."""
        return self.workload.layers * self.workload.calls

    @property
    def rows(self) -> int:
        """Rows of the batch in a call."""
        return self.batch * self.workload.rows

    @property
    def slow_axes(self) -> tuple[str, ...]:
        """Axes on which modes approximate where --cocodiff_slow_axes is not given."""
        return parse_slow_axes("", self.topology, None)

    def message_bytes(self, name: str) -> int:
        """Return the bytes of one of q, k, v and o on a rank."""
        return self.rows * self.shard.of(name) * self.workload.width * BYTES_PER_VALUE


@dataclass(frozen=True)
class StepEstimate:
    """A split in a mode; bytes and seconds are those of a step, a mean over a run, on one rank."""

    ulysses: int
    ring: int
    placement: str
    topology: str
    """Of a Ulysses group."""
    mode: str
    sent_bytes: dict[str, float]
    """By all-to-alls, along each axis."""
    ring_bytes: dict[str, float]
    """By the ring, along each axis."""
    reference_bytes: int
    compact_reference_bytes: int
    """In 8 bits."""
    a2a_seconds: float
    ring_seconds: float
    compute_seconds: float | None
    step_seconds: float | None
    """None, as computation, where it is unknown how fast ranks compute."""

    @property
    def split(self) -> UlyssesRingSplit:
        """Its degrees."""
        return UlyssesRingSplit(self.ulysses, self.ring, self.placement)

    @property
    def cost(self) -> float:
        """The step, or communication alone where computation is unknown: by this splits are compared."""
        return self.a2a_seconds + self.ring_seconds if self.step_seconds is None else self.step_seconds


def splits(case: Case, mode: str) -> list[UlyssesRingSplit]:
    """Return every split that lies on the axes. Stock places its ring across the slowest axis, and its heads must
    divide; the plugin adds heads of zeros."""
    degree, is_stock = case.topology.size, mode == STOCK
    found = [
        UlyssesRingSplit(ulysses, degree // ulysses, placement)
        for ulysses in ulysses_degrees(case.workload.heads if is_stock else degree, degree)
        for placement in (PLACEMENTS if 1 < ulysses < degree and not is_stock else (OUTER,))
    ]
    return [split for split in found if split.fits(case.topology)]


def predictions(case: Case, mode: str | None) -> list[StepEstimate]:
    """Return all splits, the fastest first, in a mode: that of a run without --cocodiff_mode if None is given."""
    mode = mode or default_mode(case.topology)
    return sorted((predict(case, split, mode) for split in splits(case, mode)), key=lambda found: found.cost)


def predict(case: Case, split: UlyssesRingSplit, mode: str) -> StepEstimate:
    """Predict a step of a split, by the plugin in a mode or by stock."""
    run, work, per_layer = _Run(case, split, mode), case.workload, case.layer_calls
    sent: dict[str, float] = {}
    around: dict[str, float] = {}
    a2a = ring = step = 0.0
    projection, attention = run.compute_seconds
    for payloads, count in Counter(run.payloads()).items():
        weight = per_layer * count / case.steps
        exchanges = {name: run.exchange(name, payloads) for name in "qkvo"}
        gathered = run.gather(payloads.ring)
        for moved, total in (*((each, sent) for each in exchanges.values()), (gathered, around)):
            for axis, size in moved.sent_bytes.items():
                total[axis] = total.get(axis, 0.0) + weight * size
        seconds = {name: moved.seconds for name, moved in exchanges.items()}
        a2a, ring = a2a + weight * sum(seconds.values()), ring + weight * gathered.seconds
        step += weight * layer_seconds(
            projection, work.mlp_projections, attention, seconds, split.ring, gathered.seconds, mode != STOCK
        )
    is_known = case.flops is not None
    return StepEstimate(
        ulysses=split.ulysses,
        ring=split.ring,
        placement=split.placement,
        topology=str(run.group),
        mode=mode,
        sent_bytes=sent,
        ring_bytes=around,
        reference_bytes=run.need.full * per_layer,
        compact_reference_bytes=run.need.compact * per_layer,
        a2a_seconds=a2a,
        ring_seconds=ring,
        compute_seconds=per_layer * ((4 + work.mlp_projections) * projection + attention) if is_known else None,
        step_seconds=step if is_known else None,
    )


def layer_seconds(
    projection: float,
    mlp_projections: float,
    attention: float,
    exchanges: Mapping[str, float],
    ring: int,
    ring_seconds: float,
    v_first: bool,
) -> float:
    """Return how long a layer lasts: the sum of its parts, less what overlaps.

    Stock projects Q, K and V and then waits for every exchange; only its ring overlaps, with attention to the K and V
    that a rank has of its own. V first overlaps V's exchange with the projections of Q and K.

    Args:
        projection: seconds of a projection from width to width.
        mlp_projections: the MLP, in such projections.
        attention: seconds of attention.
        exchanges: seconds for each of q, k, v and o.
        ring: ring degree.
        ring_seconds: until K and V of the others in the ring are there.
        v_first: whether V's exchange starts before Q and K are projected.
    """
    hidden = min(attention / ring, ring_seconds) + (min(2 * projection, exchanges["v"]) if v_first else 0.0)
    return (4 + mlp_projections) * projection + attention + sum(exchanges.values()) + ring_seconds - hidden


class _Payloads(NamedTuple):
    """Bytes that a step's coded exchanges hand to slow axes; None where values are not coded."""

    qkv: int | None
    o: int | None
    ring: int | None


class _Moved(NamedTuple):
    """What a collective takes, and sends along each axis."""

    seconds: float
    sent_bytes: Mapping[str, float]


class _Run:
    """A run of a case by a split."""

    def __init__(self, case: Case, split: UlyssesRingSplit, mode: str) -> None:
        self._case, self._split, self._is_stock = case, split, mode == STOCK
        self._heads = -(-case.workload.heads // split.ulysses)
        """Of a rank; some are of zeros where they do not divide."""
        self.group, self.ring = split.ulysses_topology(case.topology), split.ring_topology(case.topology)
        self._schedule = None if self._is_stock else modes.preset(mode, case.steps)
        self._places, self._ring_places = (
            planner.num_ranks_along(topology, case.slow_axes) for topology in (self.group, self.ring)
        )
        # One of a layer's two messages in the middle between its smallest and its largest has as much as two tensors.
        middle = sum(self._held(name) for name in "qkvo") // 2
        self._at_once = self._places > 1 and planner.is_single_stage(
            case.profile_of(self.group, middle), middle, case.slow_axes
        )

    def _held(self, name: str) -> int:
        """Bytes of one of q, k, v and o on a rank, with heads that are added."""
        return self._case.message_bytes(name) * self._heads * self._split.ulysses // self._case.workload.heads

    @property
    def compute_seconds(self) -> tuple[float, float]:
        """Of a projection and of attention, on a rank."""
        case = self._case
        if case.flops is None:
            return 0.0, 0.0
        tokens, work = case.rows * case.shard.queries, case.workload
        attention = work.attention_flops(tokens, case.shard.attended, self._heads * self._split.ulysses)
        return work.projection_flops(tokens) / case.flops, attention / case.flops

    @property
    def need(self) -> ReferenceBytes:
        """What references of a layer take."""
        if self._schedule is None:
            return ReferenceBytes(0, 0)
        held = {name: self._held(name) // BYTES_PER_VALUE for name in "qkvo"}
        share = LayerSizes(sum(held.values()), held["v"], self._case.workload.head_dim, BYTES_PER_VALUE)
        return ReferenceBytes.of(share, self._schedule, self._places, self._ring_places)

    def payloads(self) -> list[_Payloads]:
        """What each step of the run sends."""
        links = self._split.ulysses if self._at_once else self._places
        groups, shard = self._split.ulysses // links, self._case.shard
        columns = [
            self._sizes(self._places, "qkv", groups, [shard.of(name) for name in "qkv"], links),
            self._sizes(self._places, "o", groups, [shard.of("o")], links),
            self._sizes(self._ring_places, "kv", 1, [self._split.ulysses * shard.keys] * 2, 1),
        ]
        return [_Payloads(*sizes) for sizes in zip(*columns, strict=True)]

    def _sizes(self, places: int, names: str, groups: int, tokens: list[int], links: int) -> list[int | None]:
        """Bytes of coded tensors for so many links, at each step; None where they are not coded."""
        case = self._case
        if self._schedule is None or places == 1:
            return [None] * case.steps
        shapes = [(1, groups * case.rows, self._heads, count, case.workload.head_dim) for count in tokens]
        return [links * size for size in self._schedule.sent_bytes(names, shapes, _DTYPE, case.steps)]

    def exchange(self, name: str, payloads: _Payloads) -> _Moved:
        """The all-to-all of one of q, k, v and o."""
        if self._split.ulysses == 1:
            return _Moved(0.0, {})
        size = self._held(name)
        profile = self._case.profile_of(self.group, size)
        if self._is_stock:
            flat = Plan.flat(self.group)
            return _Moved(planner.all_to_all_seconds(profile, flat, size), flat.sent_bytes(size))
        together = payloads.o if name == "o" else payloads.qkv
        coded = together if name == "o" or together is None else together / 3
        way = profile, size, coded, self._at_once, self._case.slow_axes
        sent = Counter[str]()
        for leg in planner.comm_stages(*way):
            sent.update(leg.plan.sent_bytes(leg.message_bytes))
        return _Moved(planner.coded_all_to_all_seconds(*way), sent)

    def gather(self, payload: int | None) -> _Moved:
        """The all-gather of K and V around a ring."""
        if self._split.ring == 1:
            return _Moved(0.0, {})
        block = 2 * self._held("k")
        profile = self._case.profile_of(self.ring, self._split.ring * block)
        if self._is_stock:
            flat = Plan.flat(self.ring)
            return _Moved(planner.gather_seconds(profile, flat, block), flat.gathered_bytes(block))
        way = profile, block, payload, self._case.slow_axes
        sent = Counter[str]()
        for leg in planner.ring_stages(*way):
            sent.update(leg.plan.gathered_bytes(leg.message_bytes))
        return _Moved(planner.ring_seconds(*way), sent)
