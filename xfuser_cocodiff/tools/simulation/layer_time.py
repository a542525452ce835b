"""Predicts the time of one layer on one rank: computation, all-to-alls, and what overlaps.

A layer takes as long as the longer of its device, where kernels and collectives follow each other, and its host, which
launches them one by one.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from xfuser_cocodiff.tools.accelerator.accelerators import Accelerator
from xfuser_cocodiff.tools.simulation.collectives import Message
from xfuser_cocodiff.tools.simulation.layers import BYTES_PER_VALUE, JOINT, ROW, LayerKind, Pointwise, Work
from xfuser_cocodiff.tools.simulation.scenario import Scenario

INSTANT = Accelerator("instant", math.inf, math.inf, math.inf, math.inf, 0.0, 0.0, 0.0)
"""Stands for an unknown device: computation takes no time."""
_MERGE_KERNELS, _MERGE_PASSES, _MERGE_SCALARS = 4, 19, 6
"""Kernels and passes with which PyTorch's ring attention merges one further block by log-sum-exp, in fp32, and kernels
for one value per token and head."""
_CAST_KERNELS, _CAST_PASSES = 2, 6
"""Kernels and passes with which it casts the first block to fp32, and the merged output back."""


@dataclass(frozen=True)
class Computation:
    """Seconds of a layer's computation on one rank."""

    query_key: float
    """Projections, norms and RoPE of Q and K."""
    parallel: float
    """MLP parallel to attention."""
    attention: float
    rest: float
    """All else."""
    host: float
    """Host time of all launches."""

    @property
    def device(self) -> float:
        """Seconds on the device."""
        return self.query_key + self.parallel + self.attention + self.rest


def compute(scenario: Scenario, kind: LayerKind, padded_heads: int, ring: int, num_gathered: int = 1) -> Computation:
    """Return the computation of a layer.

    Args:
        scenario: model and ranks.
        kind: kind of the layer.
        padded_heads: heads of all ranks, including zero-padded ones.
        ring: ring degree.
        num_gathered: coordinates whose K and V a rank gathers.
    """
    workload, shard, accelerator = scenario.workload, scenario.shard, scenario.accelerator or INSTANT
    counts = scenario.token_counts
    query_key, rest, parallel = (work.seconds(counts, workload.width, accelerator) for work in kind.parts)

    def attention(attended: float, heads: int) -> float:
        flops = workload.attention_flops(counts[JOINT], attended, heads)
        moved = BYTES_PER_VALUE * (2 + 2 * ring * num_gathered) * counts[JOINT] * workload.width
        return accelerator.kernel_seconds(moved, attention_flops=flops, head_dim=workload.head_dim)

    further = ring - 1  # blocks that are merged
    kernels, passes = _MERGE_KERNELS * further + _CAST_KERNELS, _MERGE_PASSES * further + _CAST_PASSES
    merging = Pointwise(JOINT, kernels, passes), Pointwise(ROW, _MERGE_SCALARS * further, 0)
    merges = Work(pointwise=merging if further else ())
    return Computation(
        query_key,
        parallel,
        attention(shard.attended, padded_heads) + merges.seconds(counts, padded_heads * workload.head_dim, accelerator),
        rest + (attention(workload.cross_text_tokens, workload.heads) if kind.has_cross_attention else 0.0),
        (kind.kernels + merges.kernels + further) * accelerator.launch_seconds,
    )


class Schedule(NamedTuple):
    """All-to-alls of a layer."""

    inputs: Mapping[str, Message]
    """All-to-alls that bring Q, K and V of the first head group, by the letters of their tensors; "v" on its own may be
    sent first."""
    output: Message
    """All-to-all of O of a head group."""
    further: tuple[Message, ...] = ()
    """All-to-alls of Q, K and V of the other head groups, where there are several."""
    gathers_kv: bool = False
    """Whether K and V are gathered along some axes, so that only they cross these."""

    @property
    def groups(self) -> int:
        """Number of head groups."""
        return 1 + len(self.further)

    @property
    def messages(self) -> list[Message]:
        """All all-to-alls."""
        return [*self.inputs.values(), *self.further, *[self.output] * self.groups]


class LayerTime(NamedTuple):
    """Seconds of a layer."""

    device: float
    host: float

    @property
    def seconds(self) -> float:
        """The longer of device and host."""
        return max(self)


def layer_time(
    computation: Computation, schedule: Schedule, gather: Message, ring: int, accelerator: Accelerator, overlaps: bool
) -> LayerTime:
    """Return the time of a layer.

    Stock waits for each all-to-all at once. Only its ring overlaps, with attention to a rank's own K and V. The plugin
    computes an MLP parallel to attention while Q, K and V are in flight. It may send V first, which then overlaps with
    the projections, norms and RoPE of Q and K. With several head groups, one attends while the next ones are received
    and earlier ones are sent back.

    Args:
        computation: computation of the layer.
        schedule: all-to-alls.
        gather: all-gather of the ring.
        ring: ring degree.
        accelerator: device of the rank.
        overlaps: whether the plugin runs the layer, instead of stock.
    """
    first = schedule.inputs.get("v") if overlaps else None
    projected = computation.query_key + (first.codec_seconds if first else 0.0)
    arrived = max(projected, first.seconds if first else 0.0)
    arrived += sum(message.seconds for message in schedule.inputs.values() if message is not first)
    own_block = computation.attention / ring
    exposed_ring = max(own_block + gather.codec_seconds, gather.seconds) - own_block
    attention = (computation.attention + exposed_ring) / schedule.groups
    coding = sum(message.codec_seconds for message in schedule.inputs.values())
    computed = computation.query_key + computation.parallel + coding
    begin = max(arrived, computed) if overlaps else arrived + computation.parallel
    device = computation.rest + _head_groups_seconds(schedule, arrived, begin, attention)
    host = computation.host + (schedule.groups - 1) * accelerator.launch_seconds
    host += gather.operators * accelerator.launch_seconds
    host += gather.collectives * accelerator.collective_host_seconds
    for message in schedule.messages:
        if message.nbytes:
            device += message.copies * accelerator.kernel_seconds(2 * message.nbytes)
            host += message.operators * accelerator.launch_seconds
            host += message.collectives * accelerator.collective_host_seconds
    return LayerTime(device, host)


def _head_groups_seconds(schedule: Schedule, arrived: float, begin: float, attention: float) -> float:
    """Return the seconds from the start of a layer until O of all head groups has arrived.

    Messages follow each other on the links: inputs of all groups, then outputs. Attention follows on the device, which
    meanwhile encodes and decodes the inputs of the next group.

    Args:
        schedule: all-to-alls.
        arrived: seconds until the inputs of the first group have arrived.
        begin: seconds until its attention begins.
        attention: seconds of a group's attention.
    """
    arrivals = list(itertools.accumulate((message.seconds for message in schedule.further), initial=arrived))
    coding = [*(message.codec_seconds for message in schedule.further), 0.0]
    link_free, end = arrivals[-1], begin
    for arrival, next_coding in zip(arrivals, coding, strict=True):
        end = max(end, arrival) + attention + next_coding
        link_free = max(link_free, end) + schedule.output.seconds
    return link_free
