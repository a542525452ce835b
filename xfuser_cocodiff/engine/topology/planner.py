"""The planner: an alpha-beta cost model of the links, and the fastest plan for a message size under it.

The same model makes predictions for measured machines and, in `cocodiff plan`, for machines known by published
figures only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.plans import Plan, Stage, candidates
from xfuser_cocodiff.engine.topology.topology import Topology

MARGIN = 0.08
"""Fraction of its time that a plan must save for each stage beyond the first. Predictions have errors of this order,
which grow with the number of stages."""
EARLY_SEND_MARGIN = 0.03
"""Fraction of the time of one message that an early send must save. Autotuning compares both, except in compiled
graphs."""
GATHER_MARGIN = 0.03
"""Fraction of the time of a layer's messages that gathering K and V must save to be tried. Autotuning compares both."""
CODED_RATIO = 0.1
"""Typical size of a coded message relative to the original, by which a run decides before it knows the bits."""


@dataclass(frozen=True)
class StageCost:
    """Seconds of one stage: on the host, where nothing overlaps, and on the links."""

    host: float
    wire: float


def stage_cost(profile: Profile, stage: Stage, message_bytes: float) -> StageCost:
    """Return the cost of one stage of an all-to-all.

    Args:
        profile: link profile.
        stage: axes that the stage crosses.
        message_bytes: size of the message of each rank, including the block that it keeps.
    """
    sizes = profile.topology.shape
    block = message_bytes / math.prod(sizes[dim] for dim in stage)
    host, wire, inner = profile.launch_seconds, 0.0, 1
    for dim in reversed(stage):  # a peer belongs to the outermost axis on which it differs
        link, peers = profile.links[dim], (sizes[dim] - 1) * inner
        host += peers * link.latency_seconds
        wire = max(wire, peers * block / link.bytes_per_second)
        inner *= sizes[dim]
    return StageCost(host, wire * (profile.contention if len(stage) > 1 else 1))


def all_to_all_seconds(profile: Profile, plan: Plan, message_bytes: float) -> float:
    """Return the predicted time of an all-to-all.

    Args:
        profile: link profile.
        plan: plan of the all-to-all.
        message_bytes: size of the message of each rank, including the block that it keeps.
    """
    cost = plan_cost(profile, plan, message_bytes)
    return cost.host + cost.wire


def plan_cost(profile: Profile, plan: Plan, message_bytes: float) -> StageCost:
    """Return host and link seconds of an all-to-all, over all stages; the parts of :func:`all_to_all_seconds`."""
    costs = [stage_cost(profile, stage, message_bytes) for stage in plan.stages]
    copies = (len(plan.stages) - 1) * message_bytes / profile.copy_bytes_per_second
    return StageCost(sum(cost.host for cost in costs) + copies, sum(cost.wire for cost in costs))


def early_send_pays(profile: Profile, plan_for: Callable[[int], Plan], early_bytes: int, all_bytes: int) -> bool:
    """Return whether to send a tensor early, in a message of its own, instead of with the others in one message.

    An early send costs another call, and its link time hides behind the computation of the other tensors. One message
    is better where a call costs more than its bytes.

    Args:
        profile: link profile.
        plan_for: plan by message size in bytes.
        early_bytes: size of the tensor.
        all_bytes: size of all tensors, this one included.
    """
    extra_call = plan_cost(profile, plan_for(early_bytes), early_bytes).host
    rest_bytes = all_bytes - early_bytes
    rest = all_to_all_seconds(profile, plan_for(rest_bytes), rest_bytes)
    together = all_to_all_seconds(profile, plan_for(all_bytes), all_bytes)
    return extra_call + rest < (1 - EARLY_SEND_MARGIN) * together


class SentSizes(NamedTuple):
    """Sizes of Q and K on a rank, with zero-padded heads, in any unit; V has that of K, and O that of Q."""

    query: float
    """Q where it is resharded by heads along all axes."""
    key: float
    """K where it is resharded by heads along all axes."""
    gathered_key: float
    """K where it is gathered along the slow axes, and heads are divided over the fast ones only."""

    @classmethod
    def of(
        cls, heads: int, kv_heads: int, num_slow: int, num_fast: int, tokens: int = 1, kv_tokens: int = 1
    ) -> "SentSizes":
        """Return the sizes for numbers of heads of Q and of K, which are multiples, on `num_slow * num_fast` ranks."""
        by_heads, gathered = (kv_heads + -kv_heads % ranks for ranks in (num_slow * num_fast, num_fast))
        return cls(heads // kv_heads * by_heads * tokens, by_heads * kv_tokens, gathered * kv_tokens)


def gathers_kv(num_slow: int, sizes: SentSizes) -> bool:
    """Return whether a coded layer gathers K and V along the slow axes instead of resharding by heads along them.

    Of a tensor with b bytes on a rank, an all-to-all over N coordinates sends (N - 1) / N b, an all-gather (N - 1) b.
    So the all-to-alls of Q, K, V and O send 2 (q + k) (N - 1) / N, and the gather of K and V 2 k' (N - 1), where k'
    has less zero padding: no more where N k' <= q + k. Q and O are exact then.

    Args:
        num_slow: coordinates on all slow axes together, N.
        sizes: sizes q, k and k'.
    """
    return num_slow > 1 and num_slow * sizes.gathered_key <= sizes.query + sizes.key


def gather_pays(
    profile: Profile, gathered_axes: Sequence[str], by_heads: Sequence[float], gathered: Sequence[float]
) -> bool:
    """Return whether a lossless layer may save time if it gathers K and V along some axes, so that it is worth timing.

    Args:
        profile: link profile.
        gathered_axes: names of the axes along which K and V would be gathered.
        by_heads: sizes of Q, K and V of a rank where they are resharded by heads along all axes; O has that of Q.
        gathered: their sizes where K and V are gathered, perhaps with less zero padding.
    """

    def all_to_alls(part: Profile, sizes: Sequence[float]) -> float:
        return sum(all_to_all_seconds(part, choose_plan(part, size), size) for size in (sum(sizes), sizes[0]))

    slow, fast = divide_axes(profile, gathered_axes)
    assert slow  # they have several ranks
    kv_bytes = sum(gathered[1:])
    seconds = gather_seconds(slow, choose_gather_plan(slow, kv_bytes), kv_bytes)
    seconds += all_to_alls(fast, gathered) if fast else 0.0
    return seconds < (1 - GATHER_MARGIN) * all_to_alls(profile, by_heads)


def gather_seconds(profile: Profile, plan: Plan, block_bytes: float) -> float:
    """Return the predicted time of an all-gather, whose stages each send everything gathered so far.

    The measured contention applies to all-to-alls and is ignored. An all-gather sends from neighbor to neighbor, in
    several rings, so that each axis carries only what must cross it.

    Args:
        profile: link profile.
        plan: plan of the all-gather; PyTorch's ring attention, which xDiT runs, corresponds to the flat one.
        block_bytes: size of the block of each rank.
    """
    profile, seconds = replace(profile, contention=1.0), 0.0
    for stage in plan.stages:
        ranks = math.prod(profile.topology.shape[dim] for dim in stage)
        cost = stage_cost(profile, stage, ranks * block_bytes)
        seconds += cost.host + cost.wire
        block_bytes *= ranks
    return seconds


def choose_gather_plan(profile: Profile, block_bytes: float) -> Plan:
    """Return the best plan for an all-gather of blocks of this size."""
    return _fastest(profile, lambda plan: gather_seconds(profile, plan, block_bytes))


def divide_axes(profile: Profile, slow_axes: Sequence[str]) -> tuple[Profile | None, Profile | None]:
    """Return the profiles of the slow axes and of the others; None for axes with one rank in all."""

    def restrict(is_slow: bool) -> Profile | None:
        axes = [axis for axis in profile.topology.axes if axis.size > 1 and (axis.name in slow_axes) == is_slow]
        return profile.restrict_to(Topology(tuple(axes))) if axes else None

    return restrict(True), restrict(False)


def choose_plan(profile: Profile, message_bytes: float) -> Plan:
    """Return the best plan for an all-to-all of this message size."""
    return _fastest(profile, lambda plan: all_to_all_seconds(profile, plan, message_bytes))


def _fastest(profile: Profile, seconds: Callable[[Plan], float]) -> Plan:
    """Return the plan of the least time, of which each stage beyond the first must save MARGIN."""
    return min(candidates(profile.topology), key=lambda plan: seconds(plan) / (1 - MARGIN * (len(plan.stages) - 1)))
