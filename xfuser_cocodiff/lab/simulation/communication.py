"""Predicts the communication of a layer: seconds, traffic, and memory of link references.

A layer reshards Q, K, V and O by heads, or gathers K and V along slow axes, see :mod:`kv_gather`.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.compression import modes, reference_memory
from xfuser_cocodiff.engine.compression.mode_names import PAPER
from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes, ReferenceBytes
from xfuser_cocodiff.engine.topology import head_groups, planner
from xfuser_cocodiff.engine.topology.coding_cost import CodingCost
from xfuser_cocodiff.engine.topology.device_memory import DeviceMemory
from xfuser_cocodiff.engine.topology.planner import SentSizes
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.lab.simulation import assumed_change, coded_bytes, exchange
from xfuser_cocodiff.lab.simulation.collectives import (
    all_gather,
    all_to_all,
    coded_all_to_all,
    num_ranks_along,
    ring_gather,
)
from xfuser_cocodiff.lab.simulation.kv_gather import KvGather
from xfuser_cocodiff.lab.simulation.layer_time import Gather, Message, Schedule
from xfuser_cocodiff.lab.simulation.layers import BYTES_PER_VALUE
from xfuser_cocodiff.lab.simulation.scenario import STOCK, Scenario
from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit

_DTYPE = torch.bfloat16
_STOCK_OPERATORS = 3
"""Operators around one collective of stock: a copy on both sides, and the wait."""
_PLUGIN_OPERATORS = 6
"""Operators around one all-to-all of the plugin: two copies, events of streams, bookkeeping. Measured: all-to-alls of
a layer take 0.16 ms of a CPU (docs/codec_overhead.md), as long as 20 operators of an accelerator."""
_PADDING_OPERATORS = 3
"""Operators for the zero-padded heads of a tensor: recorded steps of FLUX.1 on 16 ranks have 11 more kernel launches in
a layer, with four tensors, than those without padding would."""
_CODEC_OPERATORS = {"paper": 16, "balanced": 16, "fast": 16}
"""Operators of a layer's codecs: kernel launches and at most so many others (docs/codec_overhead.md)."""


def _of_calls(
    sizes: LayerSizes, schedule: CodecSchedule, coordinates: tuple[int, int], calls: int
) -> list[ReferenceBytes]:
    """Return the memory of a layer's link references in each call of guidance.

    The second call also keeps the values of the first one if branches are coded together.
    """
    each = ReferenceBytes.of(sizes, schedule, *coordinates)
    second = ReferenceBytes.of(sizes, schedule, *coordinates, keeps_values=True) if schedule.joint else each
    return [each, second, *[each] * (calls - 2)][:calls]


class Payloads(NamedTuple):
    """Encoded bytes per rank that one layer sends on slow axes in a step; None where nothing is encoded.

    Q, K and V share one message.
    """

    qkv: int | None
    o: int | None
    kv: int | None
    """K and V where they are gathered, which neither Q nor O are then."""
    ring: int | None


class LayerCommunication:
    """Communication of one layer on one rank, for a split in a mode."""

    def __init__(self, scenario: Scenario, split: UlyssesRingSplit, mode: str) -> None:
        self._scenario, self._split, self._mode, self._is_stock = scenario, split, mode, mode == STOCK
        grouping = scenario.workload.heads_per_kv_head
        self._heads = -(-scenario.workload.heads // grouping // split.ulysses) * grouping
        """Heads of a rank, including zero-padded heads."""
        self.padded_heads = self._heads * split.ulysses
        """Heads of all ranks, including zero-padded heads."""
        self.group, self.ring = split.ulysses_topology(scenario.topology), split.ring_topology(scenario.topology)
        self._schedule = None if self._is_stock else modes.PRESETS.get(mode)
        self._bits = (
            assumed_change.bits_of(self._schedule, scenario.steps, scenario.changes) if self._schedule else None
        )
        self._slow_axes, self._ring_slow_axes = map(scenario.slow_axes_of, (self.group, self.ring))
        self._num_slots = num_ranks_along(self.group, self._slow_axes)
        self._num_ring_slots = num_ranks_along(self.ring, self._ring_slow_axes)
        self.gather = self._gather()
        """Gather of K and V that the layer uses, or tries in a lossless mode; None where it reshards by heads."""
        self._is_uncoded = self._schedule is not None and not self._coding_saves_time()
        """Whether a lossy mode leaves the layer lossless; it is then sent by heads, in one head group."""
        if self._is_uncoded:
            self._schedule = self.gather = None

    @property
    def is_coded_gather(self) -> bool:
        """Whether the layer always gathers K and V, encoded."""
        return self.gather is not None and self._is_coded

    @property
    def _is_coded(self) -> bool:
        """Whether all-to-alls or gathers of the layer are encoded; a lossy mode without slow axes is lossless."""
        return self._schedule is not None and self._num_slots > 1

    def _coding_saves_time(self) -> bool:
        """Return whether coding saves more link time than it adds host time, by the rule of a run that measures its
        slow axes."""
        names = "kv" if self.gather else "qkvo"
        parts = [
            (self.group, self._slow_axes, (self._num_slots, 1), len(names)),
            (self.ring, self._ring_slow_axes, (1, self._num_ring_slots), len("kv")),
        ]
        sizes = self.gather.layer_sizes if self.gather else self._layer_sizes
        saved = added = 0.0
        for group, slow_axes, coordinates, num_tensors in parts:
            if num_ranks_along(group, slow_axes) > 1:
                profile = self._scenario.link_profile(group, self._scenario.message_bytes("q"))
                cost = CodingCost.of(profile, slow_axes)
                saved += cost.saved_link_seconds(sizes.slow_axis_bytes(*coordinates))
                added += cost.added_host_seconds(num_tensors)
        return saved >= added

    def _gather(self) -> KvGather | None:
        """Return the gather of K and V, which has no ring beside it.

        A lossy mode gathers along the slow axes by the planner's rule; the paper's has no gather. A lossless layer may
        do so along the outermost axis.
        """
        if self._is_stock or self._split.ring > 1 or self.group.size == 1:
            return None
        if not self._is_coded:
            moving = tuple(axis.name for axis in self.group.axes if axis.size > 1)
            gather = KvGather(self._scenario, self.group, moving[:1])
            by_heads = [self._tensor_bytes(name) for name in "qkv"]
            profile = self._scenario.link_profile(self.group, self._tensor_bytes("q"))
            return gather if gather.is_tried(profile, by_heads) else None
        if self._mode != PAPER and planner.gathers_kv(self._num_slots, self._sent_sizes):
            return KvGather(self._scenario, self.group, self._slow_axes)
        return None

    @property
    def _sent_sizes(self) -> SentSizes:
        """Sizes of Q and K on a rank, in units of K without zero padding."""
        workload, num_fast = self._scenario.workload, self.group.size // self._num_slots
        kv_heads = workload.heads // workload.heads_per_kv_head
        sizes = SentSizes.of(workload.heads, kv_heads, self._num_slots, num_fast)
        return SentSizes(*(size / kv_heads for size in sizes))

    def exchange_reason(self, gathered_axes: Sequence[str]) -> str:
        """Return why the layer gathers K and V along these axes, or along none."""
        if self._is_uncoded:
            return exchange.UNCODED_REASON
        if self._schedule is None:
            return exchange.lossless_reason(gathered_axes)
        has_ring = self._split.ring > 1
        return exchange.lossy_reason(self.group, self._slow_axes, self._sent_sizes, self._mode, has_ring)

    def _tensor_bytes(self, name: str) -> int:
        """Return the bytes per rank of one of q, k, v and o, including zero-padded heads."""
        return self._scenario.message_bytes(name) * self.padded_heads // self._scenario.workload.heads

    @property
    def _layer_sizes(self) -> LayerSizes:
        """Sizes of a rank's tensors where they are sent by heads."""
        num_values = {name: self._tensor_bytes(name) // BYTES_PER_VALUE for name in "qkvo"}
        return LayerSizes(sum(num_values.values()), num_values["v"], self._scenario.values_of_row, BYTES_PER_VALUE)

    @property
    def _references(self) -> list[ReferenceBytes]:
        """Memory of the link references of the layer, in each call of a step; empty where it is lossless."""
        if self._schedule is None or self._num_slots * self._num_ring_slots == 1:
            return []
        if self.gather:
            sizes, coordinates = self.gather.layer_sizes, (1, self.gather.num_slow)
        else:
            sizes, coordinates = self._layer_sizes, (self._num_slots, self._num_ring_slots)
        return _of_calls(sizes, self._schedule, coordinates, self._scenario.workload.calls)

    @property
    def reference_bytes(self) -> ReferenceBytes:
        """Memory of the link references of the layer, in all calls of a step."""
        calls = self._references
        return ReferenceBytes(sum(call.predicted for call in calls), sum(call.single for call in calls))

    def default_budget(self, memory: DeviceMemory) -> float:
        """Return the bytes that link references of a run may take by default."""
        sizes = self.gather.layer_sizes if self.gather else self._layer_sizes
        return max(0.0, reference_memory.default_budget(memory, sizes, has_known_end=True))

    def coded_layers(self, budget: float) -> int:
        """Return the number of layers whose link references fit a budget, counted once for each call of a step.

        All fit with prediction, or as many as fit without it, in the order of the calls.
        """
        layers, num_coded = self._scenario.workload.layers, 0
        if layers * self.reference_bytes.predicted <= budget:
            return layers * len(self._references)
        for call in self._references:
            fitting = min(layers, int(budget // call.single))
            num_coded += fitting
            budget -= fitting * call.single
        return num_coded

    def payloads(self) -> list[Payloads]:
        """Return the encoded bytes of each step of a run."""
        if self.gather and self._schedule and self._is_coded:
            return [
                Payloads(None, None, size, None) for size in self.gather.payloads(self._schedule, _DTYPE, self._bits)
            ]
        num_slots, shard = self._num_slots, self._scenario.shard
        groups = self._split.ulysses // num_slots
        columns = [
            self._encoded_bytes(num_slots, "qkv", groups, [shard.num_tokens(name) for name in "qkv"], num_slots),
            self._encoded_bytes(num_slots, "o", groups, [shard.num_tokens("o")], num_slots),
            [None] * self._scenario.steps,
            self._encoded_bytes(self._num_ring_slots, "kv", 1, [self._split.ulysses * shard.keys] * 2, 1),
        ]
        return [Payloads(*sizes) for sizes in zip(*columns, strict=True)]

    def _encoded_bytes(
        self, num_slots: int, names: str, groups: int, tokens: list[int], num_links: int
    ) -> list[int | None]:
        """Return the encoded bytes of some tensors for each step; None where they are not encoded.

        Args:
            num_slots: number of coordinates on slow axes; nothing is encoded for one.
            names: names of the tensors, letters of "qkvo".
            groups: groups of tokens that a link carries.
            tokens: tokens per group of each tensor.
            num_links: number of links.
        """
        scenario = self._scenario
        if self._schedule is None or num_slots == 1:
            return [None] * scenario.steps
        head_dim = scenario.workload.head_dim
        group = scenario.workload.heads_per_kv_head
        heads = [self._heads // group if name in "kv" else self._heads for name in names]
        counts = zip(heads, tokens, strict=True)
        shapes = [(1, groups * scenario.rows, number, count, head_dim) for number, count in counts]
        branches = scenario.workload.rows_per_image
        sizes = coded_bytes.sent_bytes(self._schedule, names, shapes, _DTYPE, scenario.steps, branches, self._bits)
        return [num_links * size for size in sizes]

    def schedules(self, payloads: Payloads) -> list[Schedule]:
        """Return the schedules among which a layer's is chosen.

        Stock has one, with one or three all-to-alls of Q, K and V. The plugin sends V first or with Q and K, and a
        lossless layer may also run as in stock, without stages, by head groups, or with gathered K and V, whose bits
        are taken to be the same. A coded layer with gathered K and V may run by head groups too.
        """
        if self._is_stock:
            groups = ["qkv"] if self._scenario.workload.combines_qkv else ["q", "k", "v"]
            return [self._schedule_of(groups, payloads, is_flat=True)]
        inputs = (["v", "qk"], ["qkv"])
        if self.is_coded_gather:
            assert self.gather
            numbers = [1] if payloads.kv is None else [1, *self.gather.head_groups()]
            return [self._gathered_schedule(names, payloads.kv, number) for number in numbers for names in inputs]
        schedules = [self._schedule_of(names, payloads) for names in inputs]
        if payloads.qkv is not None or payloads.o is not None:
            return schedules
        numbers = self._head_groups()
        schedules += [self._schedule_of(names, payloads, groups=number) for number in numbers for names in inputs]
        if self.gather:
            tried = [1, *(groups for groups in numbers if self.gather.heads % groups == 0)]
            schedules += [self._gathered_schedule(names, None, groups) for groups in tried for names in inputs]
        return schedules if self._is_uncoded else [*schedules, self._schedule_of(["qkv"], payloads, is_flat=True)]

    def _gathered_schedule(self, names: Sequence[str], payload: int | None, groups: int = 1) -> Schedule:
        """Return the schedule with gathered K and V, in these messages of Q, K and V."""
        assert self.gather
        codec_operators = 0 if payload is None else _CODEC_OPERATORS[self._mode]
        of = functools.partial(
            self.gather.message,
            payload=payload,
            groups=groups,
            operators=_PLUGIN_OPERATORS,
            codec_operators=codec_operators,
        )
        return Schedule({each: of(each) for each in names}, of("o"), (of("qkv"),) * (groups - 1), gathers_kv=True)

    def _head_groups(self) -> list[int]:
        """Return the numbers of head groups that all-to-alls by heads try; none in lossy modes.

        With a ring none is predicted: its messages share the links with those of other head groups.
        """
        is_coded = self._schedule is not None and self._num_slots * self._num_ring_slots > 1
        if self._split.ulysses == 1 or self._split.ring > 1 or is_coded or self._is_uncoded:
            return []
        numbers = head_groups.divisors_to_try(self._heads)
        inputs, output = sum(self._tensor_bytes(name) for name in "qkv"), self._tensor_bytes("o")
        profile = self._scenario.link_profile(self.group, inputs)
        plan_for = functools.partial(planner.choose_plan, profile)
        return [
            groups
            for fewer, groups in zip([1, *numbers], numbers, strict=False)
            if head_groups.head_groups_pay(profile, plan_for, inputs, output, groups, fewer)
        ]

    def _schedule_of(
        self, names: Sequence[str], payloads: Payloads, is_flat: bool = False, groups: int = 1
    ) -> Schedule:
        inputs = {each: self._all_to_all(each, payloads, is_flat, groups) for each in names}
        further = (self._all_to_all("qkv", payloads, is_flat, groups),) * (groups - 1)
        return Schedule(inputs, self._all_to_all("o", payloads, is_flat, groups), further)

    def _all_to_all(self, names: str, payloads: Payloads, is_flat: bool, groups: int = 1) -> Message:
        """Return one all-to-all of some of q, k, v and o, of one of several head groups."""
        if self._split.ulysses == 1:
            return Message(0.0, {}, 0, 0, 0, 0)
        size = sum(self._tensor_bytes(name) for name in names) // groups
        profile = self._scenario.link_profile(self.group, size)
        stacked = int(self._is_stock and len(names) > 1)  # stock stacks tensors before it copies them into a message
        copies, operators = 2 + stacked, _STOCK_OPERATORS + stacked if self._is_stock else _PLUGIN_OPERATORS
        if self.padded_heads > self._scenario.workload.heads:
            operators += _PADDING_OPERATORS * len(names)
            copies += names != "o"  # O loses the padding in a copy that it has anyway
        payload: float | None = payloads.o
        if names != "o":
            payload = None if payloads.qkv is None else payloads.qkv * len(names) / 3
        if payload is None:
            cost = all_to_all(profile, size, Plan.flat(self.group) if is_flat else None)
            return Message(cost.seconds, cost.sent_bytes, size, cost.collectives, copies, operators)
        operators += _CODEC_OPERATORS[self._mode] * len(names) // 4
        cost = coded_all_to_all(profile, size, payload, self._slow_axes)
        codec_seconds = size * (self._num_slots - 1) / self._num_slots / profile.codec_bytes_per_second
        seconds = cost.seconds + codec_seconds
        return Message(seconds, cost.sent_bytes, size, cost.collectives, copies, operators, codec_seconds)

    def ring_gather(self, payload: int | None) -> Gather:
        """Return the all-gather of K and V in a ring, given the encoded bytes of a block."""
        if self._split.ring == 1:
            return Gather(0.0, {}, 0, 0)
        block = 2 * self._tensor_bytes("k")
        profile = self._scenario.link_profile(self.ring, self._split.ring * block)
        if self._is_stock:
            cost = all_gather(profile, block, Plan.flat(self.ring))
            return Gather(cost.seconds, cost.sent_bytes, cost.collectives, _STOCK_OPERATORS)
        cost = ring_gather(profile, block, payload, self._ring_slow_axes)
        operators, codec_seconds = _PLUGIN_OPERATORS, 0.0
        if payload is not None:
            operators += _CODEC_OPERATORS[self._mode] // 2
            codec_seconds = self._num_ring_slots * block / profile.codec_bytes_per_second
        return Gather(cost.seconds + codec_seconds, cost.sent_bytes, cost.collectives, operators, codec_seconds)
