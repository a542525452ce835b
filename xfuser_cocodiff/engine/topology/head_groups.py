"""Which numbers of head groups are worth timing, by the planner's cost model."""

import math
from collections.abc import Callable, Sequence

from xfuser_cocodiff.engine.topology import planner
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.plans import Plan

USUAL_HEAD_GROUPS, MAX_HEAD_GROUPS = 4, 8
"""Largest number of head groups that is tried, and where the heads have no smaller divisor: further groups hide little
of the rest, and each one costs two messages."""
LAUNCH_SHARE = 0.5
"""Share of the launches of further head groups that counts. Assumed: most are hidden behind attention or queue behind
messages in flight. A share that is too small costs some timed steps, one that is too large the gain."""


def divisors_to_try(*heads: int) -> list[int]:
    """Return the numbers of head groups to try, ascending: the smallest, and the largest up to USUAL_HEAD_GROUPS.

    Args:
        heads: numbers of heads of Q and of K and V on a rank.
    """
    most = math.gcd(*heads)
    divisors = [number for number in range(2, MAX_HEAD_GROUPS + 1) if most % number == 0]
    return sorted({*divisors[:1], *[number for number in divisors if number <= USUAL_HEAD_GROUPS][-1:]})


def head_groups_pay(
    profile: Profile, plan_for: Callable[[int], Plan], input_bytes: int, output_bytes: int, groups: int, fewer: int = 1
) -> bool:
    """Return whether so many head groups may save time over fewer, so that they are worth timing.

    With N groups, one group attends while the others are in flight. At best 1/N of the link time w of Q, K, V and O
    remains exposed: that of the first group's inputs and of the last one's output. Each group sends two messages of
    its own, whose collectives cost the launches l. So n groups may be faster than m where
    w / m - w / n > LAUNCH_SHARE (n - m) l. Attention may be too short to hide the rest, and V may be hidden already:
    only a measurement decides.

    Args:
        profile: link profile.
        plan_for: plan by message size in bytes.
        input_bytes: size of Q, K and V of all heads.
        output_bytes: size of O of all heads.
        groups: number of head groups.
        fewer: smaller number of head groups.
    """
    sizes = input_bytes, output_bytes

    def exposed(number: int) -> float:
        return sum(planner.plan_cost(profile, plan_for(size // number), size).wire for size in sizes) / number

    # The cost of an empty message: copies between stages take as long for all groups together.
    launches = sum(planner.plan_cost(profile, plan_for(size // groups), 0).host for size in sizes)
    return exposed(fewer) - exposed(groups) > LAUNCH_SHARE * (groups - fewer) * launches


def gathered_head_groups_pay(
    profile: Profile, gathered_axes: Sequence[str], input_bytes: int, output_bytes: int, groups: int, fewer: int = 1
) -> bool:
    """Return whether so many head groups of a coded layer that gathers K and V may save time over fewer.

    The rule of :func:`head_groups_pay`, where w is the link time of coded K and V along the gathered axes, and l the
    launches of the messages of a group along these and along the other axes.

    Args:
        profile: link profile.
        gathered_axes: names of the axes along which K and V are gathered.
        input_bytes: size of Q, K and V of all heads, without codecs.
        output_bytes: size of O of all heads, which is that of Q.
        groups: number of head groups.
        fewer: smaller number of head groups.
    """
    slow, fast = planner.divide_axes(profile, gathered_axes)
    assert slow  # they have several ranks
    kv_bytes = planner.CODED_RATIO * (input_bytes - output_bytes)
    plan = planner.choose_gather_plan(slow, kv_bytes / groups)
    launches = planner.gather_seconds(slow, plan, 0)
    link_seconds = planner.gather_seconds(slow, plan, kv_bytes) - launches
    if fast:
        sizes = input_bytes // groups, output_bytes // groups
        launches += sum(planner.plan_cost(fast, planner.choose_plan(fast, size), 0).host for size in sizes)
    return link_seconds / fewer - link_seconds / groups > LAUNCH_SHARE * (groups - fewer) * launches
