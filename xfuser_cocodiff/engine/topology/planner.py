"""The planner: an alpha-beta cost model of the links, and the plan that it finds fastest for a size.

The same model predicts for a measured machine and, in `cocodiff simulate`, for one that we only know on paper.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.plans import Plan, Stage, candidates
from xfuser_cocodiff.engine.topology.topology import Topology

MARGIN = 0.08
"""Share of its time that a plan must promise to save for every stage beyond the first one: predictions have errors of
this order, and more so the more parts they add up."""
CODED = 0.1
"""About what codecs leave of a message."""
DIRECT_MARGIN = 0.05
"""The same for direct sends in place of a collective."""


@dataclass(frozen=True)
class StageCost:
    """Seconds of one stage: on the host, where nothing overlaps, and on the links."""

    host: float
    wire: float


def stage_cost(profile: Profile, stage: Stage, message_bytes: float, direct: bool = False) -> StageCost:
    """What a stage costs when every rank holds a message of `message_bytes`, its own share included."""
    profile = _way(profile, direct)
    sizes = profile.topology.shape
    share = message_bytes / math.prod(sizes[dim] for dim in stage)
    host, wire, inner = profile.launch_seconds, 0.0, 1
    for dim in reversed(stage):  # a peer belongs to the outermost axis on which it differs
        link, peers = profile.links[dim], (sizes[dim] - 1) * inner
        host += peers * link.latency_seconds
        wire = max(wire, peers * share / link.bytes_per_second)
        inner *= sizes[dim]
    return StageCost(host, wire * (profile.contention if len(stage) > 1 else 1))


def all_to_all_seconds(profile: Profile, plan: Plan, message_bytes: float) -> float:
    """Predicted time of an all-to-all.

    Args:
        profile: the machine.
        plan: how the all-to-all runs.
        message_bytes: what a rank holds before it, its own share included.
    """
    cost = plan_cost(profile, plan, message_bytes)
    return cost.host + cost.wire


def plan_cost(profile: Profile, plan: Plan, message_bytes: float) -> StageCost:
    """The parts of :func:`seconds`, for all stages of a plan."""
    stages = zip(plan.stages, plan.direct, strict=True)
    costs = [stage_cost(profile, stage, message_bytes, direct) for stage, direct in stages]
    copies = (len(plan.stages) - 1) * message_bytes / profile.copy_bytes_per_second
    return StageCost(sum(cost.host for cost in costs) + copies, sum(cost.wire for cost in costs))


def early_send_pays(profile: Profile, plan_for: Callable[[int], Plan], ahead_bytes: int, all_bytes: int) -> bool:
    """Whether a tensor is better sent ahead, while others are computed, than in one message with them.

    Ahead it costs a call of its own, and its time on the links hides behind computation. So all travel together where a
    call costs more than its bytes.

    Args:
        profile: the machine.
        plan_for: the plan of a message of so many bytes.
        ahead_bytes: of the tensor.
        all_bytes: of all tensors, this one included.
    """
    call = plan_cost(profile, plan_for(ahead_bytes), ahead_bytes).host
    rest, together = (
        all_to_all_seconds(profile, plan_for(size), size) for size in (all_bytes - ahead_bytes, all_bytes)
    )
    return call + rest < (1 - MARGIN) * together


class CommStage(NamedTuple):
    """A collective along all axes, or along some of them."""

    profile: Profile
    plan: Plan
    message_bytes: float
    """That a rank holds before it."""


def comm_stages(
    profile: Profile,
    message_bytes: float,
    payload_bytes: float | None = None,
    at_once: bool = False,
    slow_axes: Sequence[str] = (),
) -> list[CommStage]:
    """The way of an exchange, by the best plans.

    As it is, it takes all axes at once. Coded in stages, it goes along the fast axes first, as it is; then what has to
    cross slow ones is encoded, and goes along these. Coded at once, what is encoded goes along all axes, and what stays
    where it is on slow ones goes along the fast ones, as it is, beside it.

    Args:
        profile: the machine.
        message_bytes: what a rank holds before it, its own share included.
        payload_bytes: the same of what is encoded; None where everything travels as it is.
        at_once: how it goes where it is encoded, and some axes are fast.
        slow_axes: their names.
    """
    slow, fast = (_along(profile, slow_axes, is_slow) for is_slow in (True, False))
    if payload_bytes is None or slow is None:
        parts = [(profile, message_bytes)]
    elif fast is None:
        parts = [(slow, payload_bytes)]
    elif at_once:
        parts = [(profile, payload_bytes), (fast, message_bytes / slow.topology.size)]
    else:
        parts = [(fast, message_bytes), (slow, payload_bytes)]
    return [CommStage(part, choose_plan(part, size), size) for part, size in parts]


def is_single_stage(profile: Profile, message_bytes: float, slow_axes: Sequence[str]) -> bool:
    """Whether coded exchanges take all axes at once. That saves fast axes most of the bytes, and costs messages.

    Args:
        profile: the machine.
        message_bytes: of a middle one among a layer's, which go alike: what both ends hold fits one way only.
        slow_axes: their names.
    """
    in_stages, at_once = (
        sum(
            all_to_all_seconds(*leg)
            for leg in comm_stages(profile, message_bytes, CODED * message_bytes, way, slow_axes)
        )
        for way in (False, True)
    )
    return at_once < (1 - MARGIN) * in_stages


def exchange_seconds(
    profile: Profile,
    message_bytes: float,
    payload_bytes: float | None = None,
    at_once: bool = False,
    slow_axes: Sequence[str] = (),
) -> float:
    """Predicted time of an exchange: of its legs, and of encoding what crosses slow axes; for arguments see
    :func:`comm_stages`."""
    moving = sum(
        all_to_all_seconds(*leg) for leg in comm_stages(profile, message_bytes, payload_bytes, at_once, slow_axes)
    )
    if payload_bytes is None:
        return moving
    places = num_ranks_along(profile.topology, slow_axes)
    return moving + message_bytes * (places - 1) / places / profile.codec_bytes_per_second


def num_ranks_along(topology: Topology, axes: Sequence[str]) -> int:
    """Return the number of places on some axes."""
    return math.prod(axis.size for axis in topology.axes if axis.name in axes)


def gather_seconds(profile: Profile, plan: Plan, block_bytes: float) -> float:
    """Predicted time in which every rank gets the blocks of all others: in each stage all that has come before goes to
    each rank of it.

    What is known of contention is known of all-to-alls. A collective goes from neighbour to neighbour. Gloo, which
    alone has direct sends beside it, has one ring, in which the slowest link carries the blocks of all ranks but one;
    others lay several, so that each axis carries what has to cross it.

    Args:
        profile: the machine.
        plan: how the all-gather runs; PyTorch's ring, which xDiT runs, has the flat one.
        block_bytes: what a rank holds before it.
    """
    direct = profile.direct and replace(profile.direct, contention=1.0)
    profile, seconds = replace(profile, contention=1.0, direct=direct), 0.0
    for stage, is_direct in zip(plan.stages, plan.direct, strict=True):
        ranks = math.prod(profile.topology.shape[dim] for dim in stage)
        cost = stage_cost(profile, stage, ranks * block_bytes, is_direct)
        slowest = min(profile.links[dim].bytes_per_second for dim in stage)
        is_one_ring = direct and not is_direct and len(stage) > 1
        seconds += cost.host + ((ranks - 1) * block_bytes / slowest if is_one_ring else cost.wire)
        block_bytes *= ranks
    return seconds


def choose_gather_plan(profile: Profile, block_bytes: float) -> Plan:
    """The plan to use for an all-gather of such blocks."""

    def counted(plan: Plan) -> float:
        return gather_seconds(profile, plan, block_bytes) / (1 - MARGIN * _complexity(plan))

    plans = candidates(profile.topology)
    if profile.direct:
        plans += [replace(plan, direct=(True,) * len(plan.stages)) for plan in plans]
    return min(plans, key=counted)


def ring_seconds(
    profile: Profile, block_bytes: float, payload_bytes: float | None = None, slow_axes: Sequence[str] = ()
) -> float:
    """Predicted time until the K and V of all ranks of a ring are there, by the best plans.

    Args:
        profile: of the ring.
        block_bytes: K and V of a rank.
        payload_bytes: what they are encoded in for slow axes; None where they travel as they are.
        slow_axes: their names.
    """
    way = ring_stages(profile, block_bytes, payload_bytes, slow_axes)
    moving = sum(gather_seconds(*leg) for leg in way)
    if payload_bytes is None:
        return moving
    return moving + way[0].profile.topology.size * block_bytes / profile.codec_bytes_per_second


def ring_stages(
    profile: Profile, block_bytes: float, payload_bytes: float | None = None, slow_axes: Sequence[str] = ()
) -> list[CommStage]:
    """The all-gathers of a ring, by the best plans; for arguments see above.

    Coded, a block goes along the slow axes first. Along the fast ones goes what a rank has of its own, and what it has
    decoded.
    """
    slow, fast = (_along(profile, slow_axes, is_slow) for is_slow in (True, False))
    if payload_bytes is None or slow is None:
        return [CommStage(profile, choose_gather_plan(profile, block_bytes), block_bytes)]
    sizes = (block_bytes, (slow.topology.size - 1) * block_bytes) if fast else ()
    return [
        CommStage(slow, choose_gather_plan(slow, payload_bytes), payload_bytes),
        *(CommStage(fast, choose_gather_plan(fast, size), size) for size in sizes if fast),
    ]


def _along(profile: Profile, slow_axes: Sequence[str], is_slow: bool) -> Profile | None:
    """What is known of the axes that are slow, or of those that are not; None where none of them moves anything."""
    axes = [axis for axis in profile.topology.axes if axis.size > 1 and (axis.name in slow_axes) == is_slow]
    return profile.restrict_to(Topology(tuple(axes))) if axes else None


def _way(profile: Profile, direct: bool) -> Profile:
    """What is known of collectives, or of direct sends where that is known."""
    return profile.direct if direct and profile.direct else profile


def rank_plans(profile: Profile, message_bytes: float) -> list[tuple[Plan, float]]:
    """All plans with their predicted seconds, the one to use first.

    They are in the order of their times, where each counts for as much more as it must promise to save.
    """
    plans = [_with_direct_stages(profile, plan, message_bytes) for plan in candidates(profile.topology)]
    timed = [(plan, all_to_all_seconds(profile, plan, message_bytes)) for plan in plans]
    return sorted(timed, key=lambda pair: pair[1] / (1 - MARGIN * _complexity(pair[0])))


def choose_plan(profile: Profile, message_bytes: float) -> Plan:
    """The plan to use for a message."""
    return rank_plans(profile, message_bytes)[0][0]


def _complexity(plan: Plan) -> int:
    return len(plan.stages) - 1


def _with_direct_stages(profile: Profile, plan: Plan, message_bytes: float) -> Plan:
    """The plan with direct sends in the stages where they are faster."""
    if profile.direct is None:
        return plan

    def faster(stage: Stage) -> bool:
        costs = [stage_cost(profile, stage, message_bytes, direct) for direct in (False, True)]
        collective, direct = (cost.host + cost.wire for cost in costs)
        return direct < (1 - DIRECT_MARGIN) * collective

    return replace(plan, direct=tuple(map(faster, plan.stages)))


def lower_bound_seconds(profile: Profile, message_bytes: float) -> float:
    """Time in which the busiest axis, at its measured speed, sends the bytes that must cross it under any plan."""
    flat = Plan.flat(profile.topology).stages[0]
    ways = [profile, profile.direct] if profile.direct else [profile]
    return min(stage_cost(way, flat, message_bytes).wire / way.contention for way in ways)
