"""Trials of plans: those that the model of the links finds best against the flat collective, on a message of a size.

The model has errors, above all where a message takes about as long by several plans.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist

from xfuser_cocodiff.exchange.mesh import Mesh
from xfuser_cocodiff.machine.plan import Plan
from xfuser_cocodiff.machine.planner import MARGIN, ranking, seconds
from xfuser_cocodiff.machine.profile import Profile
from xfuser_cocodiff.measuring.stopwatch import in_a_row, race

CONTENDERS = 4
"""Plans that are tried beside the flat collective."""
WORTH_A_TRIAL = 1.3
"""Those that the model finds more than so many times slower than the best are not tried."""
MUST_SAVE = 0.03
"""Share of its time that a plan must save in the trial to be taken in place of the flat collective; and the planner's
margin for every further stage: in a step ranks compute meanwhile, and each stage waits for somebody to begin it."""
EFFORTS = ((3, 5), (1, 3))
"""How many calls a trial of a few ranks times in a row, and how often: the first for which there is time."""


def contenders(profile: Profile, message_bytes: int) -> list[Plan]:
    """The plans other than flat that are worth a trial, those that the planner prefers first.

    Flat by direct sends is always among them where the profile knows of these: that it sends fewest bytes does not
    depend on how well the links were measured. Several stages all send directly where that promises to be faster than
    the flat collective: what they bring is awaited before the first begins, which the sum of what the probe has seen of
    each does not show.
    """
    ranked = [plan for plan, _ in ranking(profile, message_bytes)]
    limit = WORTH_A_TRIAL * seconds(profile, ranked[0], message_bytes)
    flat = Plan.flat(profile.topology)
    shapes: dict[frozenset, Plan] = {}  # the order of stages makes no difference to the model; one order is enough
    if profile.direct:
        shapes[frozenset(flat.stages)] = _all_direct(flat)
    for plan in ranked:
        if plan != flat and seconds(profile, plan, message_bytes) <= limit:
            direct = _all_direct(plan) if profile.direct and not plan.is_flat else plan
            is_faster = seconds(profile, direct, message_bytes) < seconds(profile, flat, message_bytes)
            shapes.setdefault(frozenset(plan.stages), direct if is_faster else plan)
    return list(shapes.values())[:CONTENDERS]


def _all_direct(plan: Plan) -> Plan:
    return replace(plan, direct=(True,) * len(plan.stages))


def trial_seconds(profile: Profile, others: list[Plan], size: int, effort: tuple[int, int]) -> float:
    """How long a trial of a size takes, as far as the model knows."""
    plans = [Plan.flat(profile.topology), *others]
    calls, rounds = effort
    total = in_a_row(calls, profile.topology.size) * rounds + 1
    return total * sum(seconds(profile, plan, size) for plan in plans)


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
    calls, rounds = effort
    taken = race(works, in_a_row(calls, mesh.topology.size), rounds, group, device)
    by_flat, *by_others = map(median, taken)
    margins = [MUST_SAVE + MARGIN * (len(plan.stages) - 1) for plan in others]
    counts = [took / (1 - margin) for took, margin in zip(by_others, margins, strict=True)]
    best = min(range(len(others)), key=counts.__getitem__)
    return others[best] if counts[best] < by_flat else flat
