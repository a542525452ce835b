"""Trials of plans: those that the model of the links finds best against the flat collective, on a message of a size.

The model has errors, above all where a message takes about as long by several plans.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist

from xfuser_cocodiff.exchange.mesh import Mesh
from xfuser_cocodiff.machine.plan import Plan
from xfuser_cocodiff.machine.planner import MARGIN, ranking, seconds
from xfuser_cocodiff.machine.profile import Profile
from xfuser_cocodiff.measuring.stopwatch import race

CONTENDERS = 3
"""Plans that are tried beside the flat collective."""
WORTH_A_TRIAL = 1.3
"""Those that the model finds more than so many times slower than the best are not tried."""
MUST_SAVE = 0.03
"""Share of its time that a plan must save in the trial to be taken in place of the flat collective; and the planner's
margin for every further stage: in a step ranks compute meanwhile, and each stage waits for somebody to begin it."""
EFFORTS = ((3, 5), (1, 3))
"""How many calls a trial times in a row, and how often: the first for which there is time. More than so many ranks make
as many times more of them, since it takes ranks the longer to come together the more they are."""
_RANKS = 8


def contenders(profile: Profile, message_bytes: int) -> list[Plan]:
    """The plans other than flat that are worth a trial, those that the planner prefers first.

    Flat by direct sends is always among them where the profile knows of these: that it sends fewest bytes does not
    depend on how well the links were measured.
    """
    ranked = [plan for plan, _ in ranking(profile, message_bytes)]
    limit = WORTH_A_TRIAL * seconds(profile, ranked[0], message_bytes)
    flat = Plan.flat(profile.topology)
    shapes: dict[frozenset, Plan] = {}  # the order of stages makes no difference to the model; one order is enough
    if profile.direct:
        shapes[frozenset(flat.stages)] = replace(flat, direct=(True,))
    for plan in ranked:
        if plan != flat and seconds(profile, plan, message_bytes) <= limit:
            shapes.setdefault(frozenset(plan.stages), plan)
    return list(shapes.values())[:CONTENDERS]


def trial_seconds(profile: Profile, others: list[Plan], size: int, effort: tuple[int, int]) -> float:
    """How long a trial of a size takes, as far as the model knows."""
    plans = [Plan.flat(profile.topology), *others]
    calls = math.prod(_calls_and_rounds(effort, profile.topology.size)) + 1
    return calls * sum(seconds(profile, plan, size) for plan in plans)


def _calls_and_rounds(effort: tuple[int, int], ranks: int) -> tuple[int, int]:
    calls, rounds = effort
    return calls * max(1, ranks // _RANKS), rounds


def tried(
    mesh: Mesh, others: list[Plan], size: int, effort: tuple[int, int], group: dist.ProcessGroup, device: torch.device
) -> Plan:
    """The plan that is fastest for a size, found by a trial among all ranks, each of which must call this.

    Args:
        mesh: what the plans are of. Nothing may be under way in it.
        others: plans to hold against the flat one.
        size: of the message, in bytes.
        effort: calls in a row, and rounds.
        group: all ranks of the mesh.
        device: where messages lie.
    """
    trials, flat = mesh.uncounted(), Plan.flat(mesh.topology)
    if not others:
        return flat

    share = max(1, size // mesh.topology.size)
    message = torch.zeros(mesh.topology.size * share, dtype=torch.uint8, device=device)

    def work(plan: Plan) -> Callable[[], torch.Tensor]:
        return functools.partial(trials.all_to_all, message.view(*plan.shape, share), plan)

    works = [work(plan) for plan in (flat, *others)]
    race(works, 1, 1, group, device)  # opens connections and allocates
    by_flat, *by_others = map(median, race(works, *_calls_and_rounds(effort, mesh.topology.size), group, device))
    margins = [MUST_SAVE + MARGIN * (len(plan.stages) - 1) for plan in others]
    counts = [took / (1 - margin) for took, margin in zip(by_others, margins, strict=True)]
    best = min(range(len(others)), key=counts.__getitem__)
    return others[best] if counts[best] < by_flat else flat
