"""Predicts the messages with which a layer reshards Q, K, V and O: by heads, or K and V gathered along some axes."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.engine.topology import planner
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.simulation import coded_bytes
from xfuser_cocodiff.tools.simulation.collectives import (
    Message,
    all_gather,
    all_to_all,
    coded_all_to_all,
    num_ranks_along,
)
from xfuser_cocodiff.tools.simulation.layers import BYTES_PER_VALUE
from xfuser_cocodiff.tools.simulation.scenario import Scenario

DTYPE = torch.bfloat16
STOCK_OPERATORS = 3
"""Operators around one collective of stock: a copy on both sides, and the wait."""
PLUGIN_OPERATORS = 6
"""Operators around one all-to-all of the plugin: two copies, events of streams, bookkeeping. Measured: all-to-alls of
a layer take 0.16 ms of a CPU, as long as 20 operators of an accelerator."""
CODEC_OPERATORS = 4
"""Operators of the codec of a tensor: kernel launches and at most so many others (docs/maintainers.md)."""
_PADDING_OPERATORS = 3
"""Operators for the zero-padded heads of a tensor: recorded steps of FLUX.1 on 16 ranks have 11 more kernel launches in
a layer, with four tensors, than those without padding would."""
_COPIES = 2
"""Copies of a message around an all-to-all."""


class Resharding:
    """Messages of a layer from sequence-sharded to head-sharded Q, K and V, and back with O.

    Args:
        scenario: model and ranks.
        group: topology of the Ulysses group.
        gathered: names of the axes along which K and V are gathered, the outermost ones; none where all are resharded
            by heads.
    """

    def __init__(self, scenario: Scenario, group: Topology, gathered: Sequence[str] = ()) -> None:
        self._scenario, self._group, self.gathered = scenario, group, tuple(gathered)
        self.num_gathered = num_ranks_along(group, gathered)
        """Coordinates whose K and V a rank gathers."""
        self.num_fast = group.size // self.num_gathered
        """Ranks over which heads are divided."""
        self.heads = -(-scenario.workload.heads // self.num_fast)
        """Heads on a rank, including zero-padded heads."""
        self.padded_heads = self.heads * self.num_fast
        """Heads of all ranks, including zero-padded heads."""

    def tensor_bytes(self, names: str) -> int:
        """Return the bytes per rank of some of q, k, v and o, including zero-padded heads."""
        heads = self._scenario.workload.heads
        return sum(self._scenario.message_bytes(name) * self.padded_heads // heads for name in names)

    def profile(self, nbytes: float) -> Profile:
        """Return the link profile of the group for messages of so many bytes."""
        return self._scenario.link_profile(self._group, nbytes)

    @property
    def layer_sizes(self) -> LayerSizes:
        """Sizes of the layer's tensors on a rank."""
        num_values, num_v_values = (self.tensor_bytes(names) // BYTES_PER_VALUE for names in ("qkvo", "v"))
        return LayerSizes(num_values, num_v_values, self._scenario.values_of_row, BYTES_PER_VALUE)

    def payloads(
        self, schedule: CodecSchedule, names: str, num_slots: int, tokens: int, bits: Sequence[float] | None
    ) -> list[int]:
        """Return the encoded bytes of some tensors on all links, for each step of a run with these bits.

        Args:
            schedule: of the mode.
            names: letters of the tensors, which share a message.
            num_slots: coordinates on slow axes of an all-to-all; 1 in a gather.
            tokens: number of groups of tokens that a link carries, or of ranks whose tokens a block holds.
            bits: of each step.
        """
        scenario = self._scenario
        shapes = []
        for name in names:
            own = scenario.shard.num_tokens(name)
            groups, count = (tokens, own) if num_slots > 1 else (1, tokens * own)
            shapes.append((1, groups * scenario.rows, self.heads, count, scenario.workload.head_dim))
        steps = scenario.steps
        codecs = [schedule.codecs(step, steps, bits[step] if bits else None) for step in range(steps)]
        return [num_slots * coded_bytes.link_bytes(each, names, shapes, DTYPE) for each in codecs]

    def by_stock(self, names: str) -> Message:
        """Return the message of some of q, k, v and o in stock."""
        size, stacked = self.tensor_bytes(names), int(len(names) > 1)  # it stacks them before it copies them
        cost = all_to_all(self.profile(size), size, Plan.flat(self._group))
        return replace(cost, nbytes=size, copies=_COPIES + stacked, operators=STOCK_OPERATORS + stacked)

    def message(
        self,
        names: str,
        payload: float | None = None,
        slow_axes: Sequence[str] = (),
        groups: int = 1,
        is_flat: bool = False,
    ) -> Message:
        """Return the message of some of q, k, v and o of a head group in the plugin.

        Args:
            names: letters of the tensors.
            payload: encoded bytes of these tensors, or of K and V where they are gathered; None where they are
                lossless.
            slow_axes: names of the axes that an encoded message crosses.
            groups: number of head groups.
            is_flat: whether its plan is flat.
        """
        size = self.tensor_bytes(names) // groups
        if self.gathered:
            return self._gathering(names, size, payload, groups)
        profile, copies, operators = self.profile(size), _COPIES, PLUGIN_OPERATORS
        if self.padded_heads > self._scenario.workload.heads:
            operators += _PADDING_OPERATORS * len(names)
            copies += names != "o"  # O loses the padding in a copy that it has anyway
        if payload is None:
            cost = all_to_all(profile, size, Plan.flat(self._group) if is_flat else None)
            return replace(cost, nbytes=size, copies=copies, operators=operators)
        num_slots, operators = num_ranks_along(self._group, slow_axes), operators + CODEC_OPERATORS * len(names)
        codec_seconds = size * (num_slots - 1) / num_slots / profile.codec_bytes_per_second
        cost = coded_all_to_all(profile, size, payload, slow_axes)
        return cost.coded(codec_seconds, nbytes=size, copies=copies, operators=operators)

    def _gathering(self, names: str, size: int, payload: float | None, groups: int) -> Message:
        """Return a message that crosses the fast axes by heads, and then the others, which only K and V do."""
        profile = self.profile(size)
        slow, fast = planner.divide_axes(profile, self.gathered)
        costs, copies, operators, codec_seconds = [], 0, 0, 0.0
        if fast:
            costs.append(all_to_all(fast, size))
            copies, operators = _COPIES, PLUGIN_OPERATORS
        gathered = "".join(name for name in names if name in "kv")
        if gathered and slow:
            block = self.tensor_bytes(gathered) // groups
            sent = block if payload is None else payload / groups * len(gathered) / 2
            costs.append(all_gather(slow, sent))
            if payload is None:  # into one message, and out of it
                copies += round((1 + self.num_gathered) * block / size)
                operators += PLUGIN_OPERATORS
            else:
                # Both encoding a block and decoding one takes half of the codec's time for it.
                codec_seconds = self.num_gathered * block / 2 / profile.codec_bytes_per_second
                copies += 1
                operators += PLUGIN_OPERATORS // 2 + CODEC_OPERATORS * len(gathered)
        work = {"nbytes": size if costs else 0.0, "copies": copies, "operators": operators}
        return Message.sum(costs).coded(codec_seconds, **work)
