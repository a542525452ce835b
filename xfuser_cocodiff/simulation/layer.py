"""The timeline of a layer, and of a step: what computes, what moves, and what of it overlaps.

Computation is FLOPs over what a rank reaches; communication is the planner's cost model, the one that also chooses
plans on a measured machine.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xfuser_cocodiff.machine import planner
from xfuser_cocodiff.machine.plan import Plan
from xfuser_cocodiff.machine.profile import AxisLink
from xfuser_cocodiff.machine.topology import Topology
from xfuser_cocodiff.simulation.machines import NODE
from xfuser_cocodiff.simulation.scenario import Mode, Scenario
from xfuser_cocodiff.simulation.timeline import COMPUTE, LINK, Task, busy, makespan

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
    """One layer of one call."""
    workload, plan, ring = scenario.workload, scenario.plan(mode), scenario.ring_degree
    moved, indices = exchange_seconds(scenario, plan, qkv_share), 0.0
    if mode.selects and scenario.profile.slow_axes:
        moved, indices = moved + _cache_seconds(scenario), _index_seconds(scenario, qkv_share)
    return layer_tasks(
        projection=scenario.compute_seconds(workload.linear_flops(scenario.resolution, scenario.batch)),
        mlp_projections=workload.mlp_projections,
        attention=scenario.compute_seconds(workload.attention_flops(scenario.resolution, scenario.batch)),
        exchanges={
            "v": moved + indices,
            "q": moved,
            "k": moved,
            "o": exchange_seconds(scenario, plan, mode.o_share),
        },
        v_first=mode.v_first,
        ring=ring,
        ring_seconds=(ring - 1) * _ring_seconds(scenario) if ring > 1 else 0.0,
    )


def layer_tasks(
    *,
    projection: float,
    mlp_projections: float,
    attention: float,
    exchanges: Mapping[str, float],
    v_first: bool,
    head_groups: int = 1,
    ring: int = 1,
    ring_seconds: float = 0.0,
) -> list[Task]:
    """What a rank does in a layer. Stock projects Q, K and V and then waits for every exchange: only its ring overlaps.

    Args:
        projection: seconds of a projection from width to width.
        mlp_projections: the MLP, in such projections.
        attention: seconds of attention.
        exchanges: seconds for each of v, q, k and o.
        v_first: whether V's exchange starts before Q and K are projected.
        head_groups: into how many heads are cut: while one attends, the next comes in and the one before goes back.
        ring: ring degree.
        ring_seconds: until K and V of the others in the ring are there, while the rank attends to its own.
    """
    part = 1 / head_groups

    def come_in(group: int) -> list[Task]:
        projected = dict.fromkeys("vqk", "project q and k")
        if v_first and group == 0:
            projected["v"] = "project v"
        return [Task(f"exchange {name} {group}", LINK, part * exchanges[name], (projected[name],)) for name in "vqk"]

    def attend(group: int) -> list[Task]:
        seconds, there = part * attention, (f"exchange k {group}",)
        if ring == 1:
            return [Task(f"attention {group}", COMPUTE, seconds, there)]
        return [
            Task(f"attention to its own {group}", COMPUTE, seconds / ring, there),
            Task(f"ring {group}", LINK, part * ring_seconds, there),
            Task(f"attention {group}", COMPUTE, seconds * (ring - 1) / ring, (f"ring {group}",)),
        ]

    def go_back(group: int) -> list[Task]:
        return [Task(f"exchange o {group}", LINK, part * exchanges["o"], (f"attention {group}",))]

    tasks = [Task("project v", COMPUTE, projection), Task("project q and k", COMPUTE, 2 * projection)]
    for group in range(head_groups):
        tasks += [*come_in(group), *(go_back(group - 1) if group else []), *attend(group)]
    last = head_groups - 1
    rest = (1 + mlp_projections) * projection
    return [*tasks, *go_back(last), Task("project o and mlp", COMPUTE, rest, (f"exchange o {last}",))]


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
