"""What to expect of a model of real size on a machine: splits of a degree into Ulysses and Ring, what each sends along
which axis, what references take, and how long a step lasts. Nothing is measured here: see :mod:`layer`.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from xfuser_cocodiff.codec import modes
from xfuser_cocodiff.codec.memory import Need, Share
from xfuser_cocodiff.machine import planner
from xfuser_cocodiff.machine.plan import Plan
from xfuser_cocodiff.machine.profile import Profile
from xfuser_cocodiff.machine.topology import Topology
from xfuser_cocodiff.settings.config import usual_mode
from xfuser_cocodiff.settings.placement import OUTER, PLACEMENTS, Split
from xfuser_cocodiff.simulation.layer import layer_tasks
from xfuser_cocodiff.simulation.scenario import STOCK
from xfuser_cocodiff.simulation.sharding import Shard, shard, ulysses_degrees
from xfuser_cocodiff.simulation.timeline import COMPUTE, makespan
from xfuser_cocodiff.simulation.workloads import BYTES_PER_VALUE, Workload

_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A model on the ranks that share its sequence."""

    workload: Workload
    """With the heads that it has: xDiT pads none."""
    resolution: int
    batch: int
    steps: int
    topology: Topology
    """Of all ranks."""
    profile_of: Callable[[Topology, float], Profile]
    """What is known of some of its axes, given what a rank holds before an all-to-all."""
    flops: float | None
    """FLOP/s that a rank reaches; None where nobody knows."""
    overlaps: bool = True
    """Whether a rank computes while a collective runs."""

    @property
    def shard(self) -> Shard:
        """What a rank has of the tokens."""
        return shard(self.workload, self.resolution, self.topology.size)

    @property
    def layer_calls(self) -> int:
        """Layers of a step, counted once for each call of guidance."""
        return self.workload.layers * self.workload.calls

    def message_bytes(self, name: str) -> int:
        """Bytes of one of q, k, v and o on a rank."""
        return self.batch * self.workload.rows * self.shard.of(name) * self.workload.width * BYTES_PER_VALUE

    def seconds_of(self, flops: float) -> float:
        """Time for `flops` that a rank computes; none where nobody knows its speed."""
        return flops / self.flops if self.flops else 0.0


@dataclass(frozen=True)
class Outlook:
    """What to expect of a split in a mode; bytes and seconds are those of a step, a mean over a run, on one rank."""

    ulysses: int
    ring: int
    placement: str
    topology: str
    """Of a Ulysses group."""
    mode: str
    sent_bytes: dict[str, float]
    """By all-to-alls, along each axis."""
    ring_bytes: dict[str, float]
    """By the ring."""
    reference_bytes: int
    compact_reference_bytes: int
    """In 8 bits."""
    a2a_seconds: float
    ring_seconds: float
    compute_seconds: float | None
    step_seconds: float | None

    @property
    def cost(self) -> float:
        """By which splits are compared: the step, or communication where nobody knows how fast ranks compute."""
        return self.a2a_seconds + self.ring_seconds if self.step_seconds is None else self.step_seconds


def splits(case: Case, of_stock: bool = False) -> list[Split]:
    """Every split that lies on the axes; with stock also the heads must divide, which the plugin pads."""
    degree = case.topology.size
    every = ulysses_degrees(case.workload.heads if of_stock else degree, degree)
    found = [
        Split(ulysses, degree // ulysses, placement)
        for ulysses in every
        for placement in (PLACEMENTS if 1 < ulysses < degree else PLACEMENTS[:1])
    ]
    return [split for split in found if split.fits(case.topology)]


def outlooks(case: Case, mode: str | None) -> list[Outlook]:
    """All splits, the fastest first; each in the mode that is given, or else in that which it would run in."""
    found = [outlook(case, split, mode or usual_mode(case.topology)) for split in splits(case)]
    return sorted(found, key=lambda each: each.cost)


def stock(case: Case) -> Outlook | None:
    """Stock xDiT's fastest split; None where none lies on the axes as xDiT places it."""
    found = [outlook(case, split, STOCK) for split in splits(case, of_stock=True) if split.placement == OUTER]
    return min(found, key=lambda each: each.cost, default=None)


def outlook(case: Case, split: Split, mode: str) -> Outlook:
    """What to expect of a split in a mode, or of stock."""
    run, known = _Run(case, split, mode), case.flops is not None
    return Outlook(
        ulysses=split.ulysses,
        ring=split.ring,
        placement=split.placement,
        topology=str(run.group),
        mode=mode,
        sent_bytes=run.sent_bytes(),
        ring_bytes=run.ring_bytes(),
        reference_bytes=run.need.full * case.layer_calls,
        compact_reference_bytes=run.need.compact * case.layer_calls,
        a2a_seconds=run.a2a_seconds,
        ring_seconds=run.ring_seconds,
        compute_seconds=run.compute_seconds if known else None,
        step_seconds=run.step_seconds if known else None,
    )


class _Run:
    """A run of a case by a split, by the plugin in a mode or by stock."""

    def __init__(self, case: Case, split: Split, mode: str) -> None:
        self._case, self._split, self._stock = case, split, mode == STOCK
        self._heads = -(-case.workload.heads // split.ulysses)
        """Of a rank; some of them are of zeros where they do not divide."""
        self.group, self.ring = (of(case.topology) for of in (split.ulysses_topology, split.ring_topology))
        self._schedule = None if self._stock else modes.usual(mode, case.steps)
        self._at_once = self._schedule is not None and self._goes_at_once()
        self._payloads = Counter(self._each_step())

    def _held(self, name: str) -> int:
        """Bytes of one of q, k, v and o on a rank, with heads that are added."""
        return self._case.message_bytes(name) * self._heads * self._split.ulysses // self._case.workload.heads

    def _message(self, name: str) -> tuple[Profile, int]:
        """What is known of the machine for an exchange of one of q, k, v and o, and its bytes on a rank."""
        size = self._held(name)
        return self._case.profile_of(self.group, size), size

    def _goes_at_once(self) -> bool:
        """Whether coded exchanges take all axes at once; a middle one of two has as much as two tensors."""
        middle = sum(self._held(name) for name in "qkvo") // 2
        return self._split.ulysses > 1 and planner.goes_at_once(self._case.profile_of(self.group, middle), middle)

    @property
    def _ring_profile(self) -> Profile:
        return self._case.profile_of(self.ring, self._split.ring * self._block_bytes)

    @property
    def _places(self) -> int:
        """On slow axes of a Ulysses group."""
        return _places(self._case.profile_of(self.group, self._held("q"))) if self._split.ulysses > 1 else 1

    @property
    def _links(self) -> int:
        """To which codecs send, this rank's own among them."""
        return self._split.ulysses if self._at_once else self._places

    @property
    def _ring_places(self) -> int:
        """On those of a ring."""
        return _places(self._ring_profile) if self._split.ring > 1 else 1

    @property
    def _block_bytes(self) -> int:
        """Of K and V, that a rank brings into its ring."""
        return 2 * self._held("k")

    def shape(self, name: str) -> tuple[int, ...]:
        """(L, G, H, T, D) of a tensor as codecs have it: one of its links, with all that goes by it."""
        case = self._case
        tokens = case.shard.of(name)
        groups = self._split.ulysses // self._links * case.batch * case.workload.rows
        return 1, groups, self._heads, tokens, case.workload.head_dim

    def _ring_payloads(self) -> list[float | None]:
        """What K and V of a rank are encoded in at each step; None where they travel as they are."""
        if self._schedule is None or self._ring_places == 1:
            return [None] * self._case.steps
        _, _, heads, tokens, dim = self.shape("k")
        shape = 1, self._case.batch * self._case.workload.rows, heads, self._split.ulysses * tokens, dim
        return [*self._schedule.sent_bytes("kv", [shape] * 2, _DTYPE, self._case.steps)]

    def _each_step(self) -> Iterator[tuple[int, int] | None]:
        """What of Q, K and V together and of O goes along slow axes; None where it is all as it is."""
        if self._schedule is None or self._places == 1:
            return iter([None] * self._case.steps)
        parts = ("qkv", "o")
        sent = [
            self._schedule.sent_bytes(names, [self.shape(name) for name in names], _DTYPE, self._case.steps)
            for names in parts
        ]
        return zip(*([self._links * size for size in sizes] for sizes in sent), strict=True)

    def _mean(self, of: Callable[[tuple[int, int] | None], float]) -> float:
        """Over the steps of a run."""
        return sum(count * of(payload) for payload, count in self._payloads.items()) / self._case.steps

    def _legs(self, name: str, payloads: tuple[int, int] | None) -> list[planner.Leg]:
        profile, size = self._message(name)
        if self._stock:
            return [planner.Leg(profile, Plan.flat(profile.topology), size)]
        return planner.legs(profile, size, payloads and _part(name, payloads), self._at_once)

    def _exchange(self, name: str, payloads: tuple[int, int] | None) -> float:
        if self._split.ulysses == 1:
            return 0.0
        if self._stock:
            return sum(planner.seconds(*leg) for leg in self._legs(name, None))
        return planner.exchange_seconds(*self._message(name), payloads and _part(name, payloads), self._at_once)

    def sent_bytes(self) -> dict[str, float]:
        """By all-to-alls, along each axis."""
        sent = {axis.name: 0.0 for axis in self.group.axes if self._split.ulysses > 1}
        for payloads, count in self._payloads.items():
            for leg in (leg for name in "qkvo" if sent for leg in self._legs(name, payloads)):
                for axis, size in leg.plan.sent_bytes(leg.message_bytes).items():
                    sent[axis] += count * size * self._case.layer_calls / self._case.steps
        return sent

    def ring_bytes(self) -> dict[str, float]:
        """By the ring, along each axis."""
        if self._split.ring == 1:
            return {}
        sent = dict.fromkeys((axis.name for axis in self.ring.axes), 0.0)
        for payload, count in Counter(self._ring_payloads()).items():
            for leg in self._ring_legs(payload):
                for axis, size in leg.plan.gathered_bytes(leg.message_bytes).items():
                    sent[axis] += count * size * self._case.layer_calls / self._case.steps
        return sent

    def _ring_legs(self, payload: float | None) -> list[planner.Leg]:
        if self._stock:
            return [planner.Leg(self._ring_profile, Plan.flat(self.ring), self._block_bytes)]
        return planner.ring_legs(self._ring_profile, self._block_bytes, payload)

    @property
    def need(self) -> Need:
        """What references of a layer take."""
        if self._schedule is None:
            return Need(0, 0)
        held = {name: self._held(name) // BYTES_PER_VALUE for name in "qkvo"}
        share = Share(sum(held.values()), held["v"], self._case.workload.head_dim, BYTES_PER_VALUE)
        return Need.of(share, self._schedule, self._places, self._ring_places)

    @property
    def a2a_seconds(self) -> float:
        """Of all-to-alls."""
        layer = self._mean(lambda payloads: sum(self._exchange(name, payloads) for name in "qkvo"))
        return self._case.layer_calls * layer

    @property
    def _gather_seconds(self) -> float:
        if self._split.ring == 1:
            return 0.0
        if self._stock:
            return sum(planner.gather_seconds(*leg) for leg in self._ring_legs(None))
        seconds = functools.partial(planner.ring_seconds, self._ring_profile, self._block_bytes)
        return (
            sum(count * seconds(payload) for payload, count in Counter(self._ring_payloads()).items())
            / self._case.steps
        )

    @property
    def ring_seconds(self) -> float:
        """Of the ring."""
        return self._case.layer_calls * self._gather_seconds

    @property
    def _flops(self) -> tuple[float, float]:
        """Of a projection and of attention, on a rank."""
        case = self._case
        tokens, work = case.batch * case.workload.rows * case.shard.queries, case.workload
        attended = case.shard.attended * self._heads * self._split.ulysses * work.head_dim
        return 2.0 * tokens * work.width**2, 4.0 * tokens * attended

    @property
    def compute_seconds(self) -> float:
        """Of computation."""
        projection, attention = self._flops
        layer = (4 + self._case.workload.mlp_projections) * projection + attention
        return self._case.layer_calls * self._case.seconds_of(layer)

    @property
    def step_seconds(self) -> float:
        """Of a step."""
        return self._case.layer_calls * self._mean(self._layer_seconds)

    def _layer_seconds(self, payloads: tuple[int, int] | None) -> float:
        projection, attention = map(self._case.seconds_of, self._flops)
        tasks = layer_tasks(
            projection=projection,
            mlp_projections=self._case.workload.mlp_projections,
            attention=attention,
            exchanges={name: self._exchange(name, payloads) for name in "qkvo"},
            v_first=not self._stock,
            ring=self._split.ring,
            ring_seconds=self._gather_seconds,
        )
        alone = [dataclasses.replace(task, resource=COMPUTE) for task in tasks]
        return makespan(tasks if self._case.overlaps else alone)


def _places(profile: Profile) -> int:
    """On its slow axes."""
    return math.prod(axis.size for axis in profile.topology.axes if axis.name in profile.slow_axes)


def _part(name: str, payloads: tuple[int, int]) -> float:
    """What goes along slow axes of one tensor; Q, K and V travel together."""
    return payloads[1] if name == "o" else payloads[0] / 3
