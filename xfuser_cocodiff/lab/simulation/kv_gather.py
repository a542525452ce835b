"""Predicts the messages of a layer that gathers K and V along some axes, and reshards by heads along the others."""

from collections.abc import Sequence

import torch

from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.engine.topology import head_groups, planner
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.simulation import coded_bytes
from xfuser_cocodiff.lab.simulation.collectives import CommCost, all_gather, all_to_all, num_ranks_along
from xfuser_cocodiff.lab.simulation.layer_time import Message
from xfuser_cocodiff.lab.simulation.layers import BYTES_PER_VALUE
from xfuser_cocodiff.lab.simulation.scenario import Scenario

_COPIES = 2
"""Copies of a message around an all-to-all."""


class KvGather:
    """Communication of a layer that gathers K and V.

    Args:
        scenario: model and ranks.
        group: topology of the Ulysses group.
        axes: names of the axes along which K and V are gathered, the outermost ones.
    """

    def __init__(self, scenario: Scenario, group: Topology, axes: tuple[str, ...]) -> None:
        self._scenario, self._group, self.axes = scenario, group, axes
        self.num_slow = num_ranks_along(group, axes)
        """Coordinates whose K and V a rank gathers."""
        self.num_fast = group.size // self.num_slow
        """Ranks over which heads are divided."""
        grouping = scenario.workload.heads_per_kv_head
        self.heads = -(-scenario.workload.heads // grouping // self.num_fast) * grouping
        """Heads of a rank, including zero-padded heads."""
        self.padded_heads = self.heads * self.num_fast
        """Heads of all ranks, including zero-padded heads."""

    def tensor_bytes(self, names: str) -> int:
        """Return the bytes per rank of some of q, k, v and o, including zero-padded heads."""
        heads = self._scenario.workload.heads
        return sum(self._scenario.message_bytes(name) * self.padded_heads // heads for name in names)

    def payloads(self, schedule: CodecSchedule, dtype: torch.dtype, bits: Sequence[float] | None) -> list[int]:
        """Return the encoded bytes of a rank's K and V, for each step of a run with these bits."""
        scenario, workload = self._scenario, self._scenario.workload
        tokens = self.num_fast * scenario.shard.keys
        shape = (1, scenario.rows, self.heads // workload.heads_per_kv_head, tokens, workload.head_dim)
        return coded_bytes.sent_bytes(schedule, "kv", [shape] * 2, dtype, scenario.steps, workload.rows_per_image, bits)

    @property
    def layer_sizes(self) -> LayerSizes:
        """Sizes of the layer's tensors on a rank."""
        num_values, num_v_values = (self.tensor_bytes(names) // BYTES_PER_VALUE for names in ("qkvo", "v"))
        return LayerSizes(num_values, num_v_values, self._scenario.values_of_row, BYTES_PER_VALUE)

    def head_groups(self) -> list[int]:
        """Return the numbers of head groups that a coded layer tries, ascending."""
        numbers = head_groups.divisors_to_try(self.heads, self.heads // self._scenario.workload.heads_per_kv_head)
        inputs, output = self.tensor_bytes("qkv"), self.tensor_bytes("o")
        profile = self._scenario.link_profile(self._group, inputs)
        return [
            groups
            for fewer, groups in zip([1, *numbers], numbers, strict=False)
            if head_groups.gathered_head_groups_pay(profile, self.axes, inputs, output, groups, fewer)
        ]

    def is_tried(self, profile: Profile, by_heads: Sequence[float]) -> bool:
        """Return whether a lossless layer tries it; for the arguments see :func:`planner.gather_pays`."""
        tensors = [self.tensor_bytes(name) for name in "qkv"]
        return self.num_fast > 1 and planner.gather_pays(profile, self.axes, by_heads, tensors)

    def message(
        self, names: str, payload: float | None = None, groups: int = 1, operators: int = 0, codec_operators: int = 0
    ) -> Message:
        """Return the message of some of q, k, v and o of a head group.

        Args:
            names: letters of the tensors.
            payload: encoded bytes of all heads of a rank's K and V; None where they are lossless.
            groups: number of head groups.
            operators: operators around one collective of the plugin.
            codec_operators: operators of the codecs of Q, K, V and O.
        """
        size = self.tensor_bytes(names) // groups
        profile = self._scenario.link_profile(self._group, size)
        slow, fast = planner.divide_axes(profile, self.axes)
        costs, copies, calls, codec_seconds = [], 0, 0, 0.0
        if fast:
            costs.append(all_to_all(fast, size))
            copies, calls = _COPIES, operators
        gathered = [name for name in names if name in "kv"]
        if gathered and slow:
            block = self.tensor_bytes("".join(gathered)) // groups
            sent = block if payload is None else payload / groups * len(gathered) / 2
            costs.append(all_gather(slow, sent))
            if payload is None:  # into one message, and out of it
                copies += round((1 + self.num_slow) * block / size)
                calls += operators
            else:
                # Both encoding a block and decoding one takes half of the codec's time for it.
                codec_seconds = self.num_slow * block / 2 / profile.codec_bytes_per_second
                copies += 1
                calls += operators // 2 + codec_operators * len(gathered) // 4
        cost, nbytes = CommCost.sum(costs), size if costs else 0
        seconds = cost.seconds + codec_seconds
        return Message(seconds, cost.sent_bytes, nbytes, cost.collectives, copies, calls, codec_seconds)
