"""The timeline of a layer, and of a step: what computes, what moves, and what of it overlaps.

Computation is FLOPs over what a rank reaches; communication is the planner's cost model, the one that also chooses
plans on a measured machine.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from xfuser_cocodiff import planner
from xfuser_cocodiff.bench.machines import NODE
from xfuser_cocodiff.bench.scenario import Mode, Scenario
from xfuser_cocodiff.bench.timeline import COMPUTE, LINK, Task, busy, makespan
from xfuser_cocodiff.plan import Plan
from xfuser_cocodiff.profile import AxisLink
from xfuser_cocodiff.topology import Topology

STEPS = 50
"""Denoising steps of a run, as in the paper; what a mode sends may change from step to step."""
_INDEX_BYTES = 4


@dataclass(frozen=True)
class Step:
    """Seconds of a step and where they go."""

    step: float
    compute: float
    a2a: float
    ring: float

    @property
    def hidden(self) -> float:
        """Communication that passes while the rank computes."""
        return max(self.compute + self.a2a + self.ring - self.step, 0.0)


def step(scenario: Scenario, mode: Mode) -> Step:
    """A step of a mode, averaged over a run."""
    first, last = mode.qkv_share
    shares = [first] if first == last else [first + (last - first) * i / (STEPS - 1) for i in range(STEPS)]
    layers = [_layer(scenario, mode, share) for share in shares]
    count = scenario.workload.calls * scenario.workload.layers
    timed = [_one_queue(layer) if not scenario.machine.overlaps else layer for layer in layers]
    return Step(
        step=count * statistics.fmean(makespan(layer) for layer in timed),
        compute=count * busy(layers[0], COMPUTE),
        a2a=count * statistics.fmean(busy(layer, LINK, "exchange") for layer in layers),
        ring=count * busy(layers[0], LINK, "ring"),
    )


def _one_queue(tasks: Sequence[Task]) -> list[Task]:
    """The tasks of a machine that cannot compute while it communicates."""
    return [dataclasses.replace(task, resource=COMPUTE) for task in tasks]


def _layer(scenario: Scenario, mode: Mode, qkv_share: float) -> list[Task]:
    """One layer of one call. Stock projects Q, K and V and then waits for every exchange: only its ring overlaps."""
    workload, plan = scenario.workload, scenario.plan(mode)
    projection = scenario.compute_seconds(workload.linear_flops(scenario.resolution, scenario.batch))
    moved, indices = exchange_seconds(scenario, plan, qkv_share), 0.0
    if mode.selects and scenario.profile.slow_axes:
        moved, indices = moved + _cache_seconds(scenario), _index_seconds(scenario, qkv_share)
    return [
        Task("project v", COMPUTE, projection),
        Task("project q and k", COMPUTE, 2 * projection),
        Task("exchange v", LINK, moved + indices, ("project v" if mode.v_first else "project q and k",)),
        Task("exchange q", LINK, moved, ("project q and k",)),
        Task("exchange k", LINK, moved, ("project q and k",)),
        *_attention(scenario),
        Task("exchange o", LINK, exchange_seconds(scenario, plan, mode.o_share), ("attention 0",)),
        Task("project o and mlp", COMPUTE, (1 + workload.mlp_projections) * projection, ("exchange o",)),
    ]


def _attention(scenario: Scenario) -> list[Task]:
    """Attention: a block per Ulysses group of the ring, while the next K and V arrive. The last block is number 0."""
    ring = scenario.ring_degree
    flops = scenario.workload.attention_flops(scenario.resolution, scenario.batch)
    tasks, arrived = [], "exchange k"
    for left in reversed(range(ring)):
        tasks.append(Task(f"attention {left}", COMPUTE, scenario.compute_seconds(flops) / ring, (arrived,)))
        if left:
            tasks.append(Task(f"ring {left}", LINK, _ring_seconds(scenario), (arrived,)))
            arrived = f"ring {left}"
    return tasks


def exchange_seconds(scenario: Scenario, plan: Plan, share: float = 1.0) -> float:
    """One all-to-all, of which `share` of the bytes for slow axes travels.

    A link that carries a share of the bytes takes as long as one that is as many times faster.
    """
    profile = scenario.profile
    if share != 1:
        slow, times = profile.slow_axes, 1 / share if share else math.inf
        links = tuple(_faster(link, times) if link.name in slow else link for link in profile.links)
        profile = dataclasses.replace(profile, links=links)
    return planner.seconds(profile, plan, scenario.message_bytes)


def _ring_seconds(scenario: Scenario) -> float:
    """Passing a rank's K and V to the next Ulysses group: half of a message between two nodes."""
    link = next(link for link in scenario.machine.links if link.name == NODE)
    pair = dataclasses.replace(scenario.profile, topology=Topology.named(node=2), links=(link,))
    cost = planner.stage_cost(pair, (0,), 2 * 2 * scenario.message_bytes)
    return cost.host + cost.wire


def _index_seconds(scenario: Scenario, share: float) -> float:
    """Gathering the indices of the tokens that travel: each rank sends its own to all others."""
    tokens = scenario.workload.tokens(scenario.resolution) * scenario.batch * scenario.workload.rows
    return planner.seconds(scenario.profile, Plan.flat(scenario.profile.topology), share * tokens * _INDEX_BYTES)


def _cache_seconds(scenario: Scenario) -> float:
    """Comparing a tensor with the cache, and writing what arrived over it."""
    return 2 * scenario.message_bytes / scenario.machine.copy_bytes_per_second


def _faster(link: AxisLink, times: float) -> AxisLink:
    return dataclasses.replace(link, bytes_per_second=times * link.bytes_per_second)
