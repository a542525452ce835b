"""Predicts the communication of a layer: its possible schedules, and the memory of its link references."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.default_mode import PAPER
from xfuser_cocodiff.engine.compression.reference_memory import ReferenceBytes
from xfuser_cocodiff.engine.topology import head_groups, planner
from xfuser_cocodiff.engine.topology.coding_cost import CodingCost
from xfuser_cocodiff.engine.topology.planner import SentSizes
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.tools.simulation import assumed_change
from xfuser_cocodiff.tools.simulation.collectives import Message, all_gather, num_ranks_along, ring_gather
from xfuser_cocodiff.tools.simulation.layer_time import Schedule
from xfuser_cocodiff.tools.simulation.resharding import (
    CODEC_OPERATORS,
    PLUGIN_OPERATORS,
    STOCK_OPERATORS,
    Resharding,
)
from xfuser_cocodiff.tools.simulation.scenario import STOCK, Scenario
from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit


class Payloads(NamedTuple):
    """Encoded bytes per rank that one layer sends on slow axes in a step; None where nothing is encoded.

    Q, K and V share one message.
    """

    qkv: int | None = None
    o: int | None = None
    kv: int | None = None
    """K and V where they are gathered, which neither Q nor O are then."""
    ring: int | None = None

    def of(self, names: str) -> float | None:
        """Return those of some of q, k, v and o."""
        whole = self.o if names == "o" else self.qkv
        return self.kv or (whole and whole * len(names) / (1 if names == "o" else 3))


_LOSSLESS = Payloads()


@dataclass
class LayerCommunication:
    """Communication of one layer on one rank, for a split in a mode."""

    scenario: Scenario
    split: UlyssesRingSplit
    mode: str
    gather: Resharding | None = field(init=False)
    """Gather of K and V that the layer uses, or tries in a lossless mode; None where it reshards by heads."""
    is_left_lossless: bool = field(init=False, default=False)
    """Whether a lossy mode leaves the layer lossless, because coding adds more host time than it saves link time. It is
    then sent by heads, in one head group."""

    def __post_init__(self) -> None:
        scenario, split = self.scenario, self.split
        self.group, self.ring = split.ulysses_topology(scenario.topology), split.ring_topology(scenario.topology)
        self.by_heads = Resharding(scenario, self.group)
        self._schedule = modes.PRESETS.get(self.mode)
        changes = scenario.changes
        self._bits = assumed_change.bits_of(self._schedule, scenario.steps, changes) if self._schedule else None
        self._slow_axes, self._ring_slow_axes = map(scenario.slow_axes_of, (self.group, self.ring))
        self._num_slots = num_ranks_along(self.group, self._slow_axes)
        self._num_ring_slots = num_ranks_along(self.ring, self._ring_slow_axes)
        self.gather = self._gather()
        if self._schedule and not self._coding_saves_time():
            self.is_left_lossless, self._schedule, self.gather = True, None, None

    @property
    def resharding(self) -> Resharding:
        """How an encoded layer is resharded."""
        return self.gather or self.by_heads

    @property
    def _is_coded(self) -> bool:
        """Whether all-to-alls or gathers of the layer are encoded; a lossy mode without slow axes is lossless."""
        return self._schedule is not None and self._num_slots > 1

    def _coding_saves_time(self) -> bool:
        """Return whether coding saves more link time than it adds host time, by the rule of a run that measures its
        slow axes."""
        parts = [
            (self.group, self._slow_axes, (self._num_slots, 1), len("kv" if self.gather else "qkvo")),
            (self.ring, self._ring_slow_axes, (1, self._num_ring_slots), len("kv")),
        ]
        saved = added = 0.0
        for group, slow_axes, coordinates, num_tensors in parts:
            if num_ranks_along(group, slow_axes) > 1:
                profile = self.scenario.link_profile(group, self.scenario.message_bytes("q"))
                cost = CodingCost.of(profile, slow_axes)
                saved += cost.saved_link_seconds(self.resharding.layer_sizes.slow_axis_bytes(*coordinates))
                added += cost.added_host_seconds(num_tensors)
        return saved >= added

    def _gather(self) -> Resharding | None:
        """Return the gather of K and V, which has no ring beside it.

        A lossy mode gathers along the slow axes by the planner's rule; the paper's has no gather. A lossless layer may
        do so along the outermost axis.
        """
        if self.mode == STOCK or self.split.ring > 1 or self.group.size == 1:
            return None
        if self._is_coded:
            heads, num_fast = self.scenario.workload.heads, self.group.size // self._num_slots
            sizes = SentSizes.of(heads, heads, self._num_slots, num_fast)
            gathers = self.mode != PAPER and planner.gathers_kv(self._num_slots, sizes)
            return Resharding(self.scenario, self.group, self._slow_axes) if gathers else None
        gather = Resharding(self.scenario, self.group, self.group.moving_axes[:1])
        tensors = [[each.tensor_bytes(name) for name in "qkv"] for each in (self.by_heads, gather)]
        profile = self.by_heads.profile(tensors[0][0])
        return gather if gather.num_fast > 1 and planner.gather_pays(profile, gather.gathered, *tensors) else None

    def references(self) -> list[ReferenceBytes]:
        """Return the memory of the layer's link references in each call of a step; empty where it is lossless.

        The second call also keeps the values of the first one if branches are coded together.
        """
        if self._schedule is None or self._num_slots * self._num_ring_slots == 1:
            return []
        coordinates = (1, self.gather.num_gathered) if self.gather else (self._num_slots, self._num_ring_slots)
        of = functools.partial(ReferenceBytes.of, self.resharding.layer_sizes, self._schedule, *coordinates)
        calls = range(self.scenario.workload.calls)
        return [of(keeps_values=bool(self._schedule.joint) and call == 1) for call in calls]

    def coded_layers(self, budget: float) -> int:
        """Return the number of layers whose link references fit a budget, counted once for each call of a step.

        All fit with prediction, or as many as fit without it, in the order of the calls.
        """
        layers, num_coded, calls = self.scenario.workload.layers, 0, self.references()
        if layers * sum(call.predicted for call in calls) <= budget:
            return layers * len(calls)
        for call in calls:
            fitting = min(layers, int(budget // call.single))
            num_coded += fitting
            budget -= fitting * call.single
        return num_coded

    def payloads(self) -> list[Payloads]:
        """Return the encoded bytes of each step of a run."""
        steps = self.scenario.steps
        if self._schedule is None:
            return [_LOSSLESS] * steps
        of = functools.partial(self.resharding.payloads, self._schedule, bits=self._bits)
        if self.gather and self._is_coded:
            return [Payloads(kv=size) for size in of("kv", num_slots=1, tokens=self.gather.num_fast)]
        sizes: dict[str, list[int]] = {}
        if self._num_slots > 1:
            groups = self.split.ulysses // self._num_slots
            sizes = {names: of(names, num_slots=self._num_slots, tokens=groups) for names in ("qkv", "o")}
        if self._num_ring_slots > 1:
            sizes["ring"] = of("kv", num_slots=1, tokens=self.split.ulysses)
        return [Payloads(**{name: each[step] for name, each in sizes.items()}) for step in range(steps)]

    def schedules(self, payloads: Payloads) -> list[Schedule]:
        """Return the schedules among which a layer's is chosen.

        Stock has one, with one or three all-to-alls of Q, K and V. The plugin sends V first or with Q and K, and a
        lossless layer may also run as in stock, without stages, by head groups, or with gathered K and V, whose bits
        are taken to be the same. A coded layer with gathered K and V may run by head groups too.
        """
        if self.split.ulysses == 1:
            return [Schedule({}, Message())]
        if self.mode == STOCK:
            names = ["qkv"] if self.scenario.workload.combines_qkv else ["q", "k", "v"]
            return [Schedule({each: self.by_heads.by_stock(each) for each in names}, self.by_heads.by_stock("o"))]
        if self._is_coded:
            numbers = [1, *self._head_groups(self.gather)] if self.gather else [1]
            return self._by_inputs(self.resharding, numbers, payloads)
        if self.is_left_lossless:
            return self._by_inputs(self.by_heads, [1])
        numbers = self._head_groups(self.by_heads)
        schedules = self._by_inputs(self.by_heads, [1, *numbers])
        if self.gather:
            schedules += self._by_inputs(self.gather, [1, *(n for n in numbers if self.gather.heads % n == 0)])
        flat = {names: self.by_heads.message(names, is_flat=True) for names in ("qkv", "o")}
        return [*schedules, Schedule({"qkv": flat["qkv"]}, flat["o"])]

    def _by_inputs(
        self, resharding: Resharding, numbers: Sequence[int], payloads: Payloads = _LOSSLESS
    ) -> list[Schedule]:
        """Return the schedules by numbers of head groups, each with V first and with Q, K and V together."""

        def message(names: str, groups: int) -> Message:
            return resharding.message(names, payloads.of(names), self._slow_axes, groups)

        return [
            Schedule(
                {each: message(each, groups) for each in names},
                message("o", groups),
                (message("qkv", groups),) * (groups - 1),
                gathers_kv=bool(resharding.gathered),
            )
            for groups in numbers
            for names in (["v", "qk"], ["qkv"])
        ]

    def _head_groups(self, resharding: Resharding) -> list[int]:
        """Return the numbers of head groups that a lossless layer tries, or a coded one with gathered K and V.

        With a ring none is predicted: its messages share the links with those of other head groups.
        """
        if self.split.ring > 1:
            return []
        inputs, output = resharding.tensor_bytes("qkv"), resharding.tensor_bytes("o")
        profile, numbers = resharding.profile(inputs), head_groups.divisors_to_try(resharding.heads)
        if resharding.gathered:
            pay = functools.partial(head_groups.gathered_head_groups_pay, profile, resharding.gathered)
        else:
            plan_for = functools.partial(planner.choose_plan, profile)
            pay = functools.partial(head_groups.head_groups_pay, profile, plan_for)
        pairs = zip([1, *numbers], numbers, strict=False)
        return [groups for fewer, groups in pairs if pay(inputs, output, groups, fewer)]

    def ring_gather(self, payload: int | None) -> Message:
        """Return the all-gather of K and V in a ring, given the encoded bytes of a block."""
        if self.split.ring == 1:
            return Message()
        block = 2 * self.by_heads.tensor_bytes("k")
        profile = self.scenario.link_profile(self.ring, self.split.ring * block)
        if self.mode == STOCK:
            return replace(all_gather(profile, block, Plan.flat(self.ring)), operators=STOCK_OPERATORS)
        cost = replace(ring_gather(profile, block, payload, self._ring_slow_axes), operators=PLUGIN_OPERATORS)
        if payload is None:
            return cost
        codec_seconds = self._num_ring_slots * block / profile.codec_bytes_per_second
        return cost.coded(codec_seconds, operators=PLUGIN_OPERATORS + 2 * CODEC_OPERATORS)
