"""Plans by message size: policies of the planner, with a plan for each size, and which tensors are sent early."""

import functools
from collections.abc import Callable
from dataclasses import replace

from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.topology import planner
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.plans import Plan

_QKV = 3
"""Tensors in a message of Q, K and V, of about the same size."""
SIZES = range(6, 40)
"""Exponents of the message sizes, powers of two, for which plans are chosen."""


def planned(profile: Profile) -> PlanPolicy:
    """Return the policy of the planner's plan for each size; sizes with the same nearest power of two share a plan."""
    table: list[tuple[int, Plan]] = []
    for power in SIZES:
        plan, limit = planner.choose_plan(profile, 1 << power), round(2 ** (power + 0.5))
        if table and table[-1][1] == plan:
            table.pop()
        table.append((limit, plan))
    choose_gather = functools.cache(functools.partial(planner.choose_gather_plan, profile))
    return PlanPolicy(tuple(table), choose_gather=choose_gather)


def with_early_sends(policy: PlanPolicy, profile: Profile | None, synchronous: bool) -> PlanPolicy:
    """Return the policy with rules for early sends.

    The planner decides if there is a profile; without one, tensors are always sent early. Nothing is sent early if
    collectives are synchronous.
    """
    sends_early: Callable[[int, int], bool] = policy.sends_early
    if synchronous:
        sends_early = _never
    elif profile:
        sends_early = functools.partial(planner.early_send_pays, profile, policy.choose)
    graph_early_bytes = None  # smallest size from which on all larger ones are sent early
    for power in reversed(SIZES):
        if not sends_early(1 << power, _QKV << power):
            break
        graph_early_bytes = 1 << power
    return replace(policy, sends_early=sends_early, graph_early_bytes=graph_early_bytes)


def _never(early_bytes: int, all_bytes: int) -> bool:
    return False
