"""The plan of each exchange: what the user fixed, what the planner chooses, or what a trial confirms of its choice.

A model of the links has errors, above all where a message takes about as long by several plans. So the first time that
a size comes up, the plans that the model finds best are tried against the flat collective, on a message of that size.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from xfuser_cocodiff import probe
from xfuser_cocodiff.collectives import Mesh
from xfuser_cocodiff.config import CocoDiffConfig
from xfuser_cocodiff.options import EXACT
from xfuser_cocodiff.plan import DIRECT, Plan, candidates
from xfuser_cocodiff.planner import ahead_pays, choose, ranking, seconds
from xfuser_cocodiff.profile import Profile
from xfuser_cocodiff.slow_way import SlowWay
from xfuser_cocodiff.stopwatch import race
from xfuser_cocodiff.topology import Topology
from xfuser_cocodiff.traffic import Traffic

CONTENDERS = 3
"""Plans that are tried beside the flat collective."""
WORTH_A_TRIAL = 1.3
"""Those that the model finds more than so many times slower than the best are not tried."""
MUST_SAVE = 0.03
"""Share of the flat collective's time that another plan must save in the trial."""
EFFORTS = ((3, 5), (1, 3))
"""How many calls a trial times in a row, and how often: the first that takes no longer than TRIAL_SECONDS."""
TRIAL_SECONDS = 3.0
"""Larger messages are tried by smaller ones, for which this is enough: bandwidth decides there either way."""


def planned_mesh(
    group: dist.ProcessGroup,
    config: CocoDiffConfig,
    device: torch.device,
    traffic: Traffic | None = None,
    measured: Profile | None = None,
) -> tuple[Mesh, SlowWay | None]:
    """A mesh over a group that runs by the plan of the settings, or else chooses one for each size; and its slow axes.

    Every rank of the group must call this. With a profile in the settings the planner's choice stands; otherwise the
    links are probed here, and choices are confirmed by trials. Either way all ranks choose the same. Slow axes are told
    apart where the mode of the settings approximates; their exchanges go by plans of their own. What was `measured` of
    the links need not be probed again.
    """
    if config.plan:
        check_fits(config.plan, device, "--cocodiff_a2a")
    plans = [config.plan] if config.plan else candidates(config.topology)
    timeout = timedelta(seconds=config.timeout) if config.timeout else None
    mesh = Mesh.over(group, config.topology, plans, traffic, timeout, device)
    profile = config.profile or measured
    if profile is None and (config.plan is None or (config.mode != EXACT and config.slow_axes is None)):
        every = mesh if config.plan is None else Mesh.over(group, config.topology, timeout=timeout, device=device)
        profile = probe.measure(every, group, device)
    profile = profile and known_of(profile, device, config.synchronous)

    def choosing(group: dist.ProcessGroup, mesh: Mesh) -> Mesh:
        if profile is None:
            return mesh
        known = profile.along(mesh.topology)
        if config.profile:
            return replace(mesh, choose=functools.cache(functools.partial(choose, known)))
        return replace(mesh, choose=by_trial(mesh, known, group, device))

    def part(group: dist.ProcessGroup, topology: Topology) -> Mesh:
        return choosing(group, Mesh.over(group, topology, timeout=timeout, device=device))

    if config.plan is None:
        mesh = choosing(group, mesh)
    mesh = replace(mesh, ahead=sends_ahead(profile, mesh.choose, config.synchronous))
    if config.mode == EXACT:
        return mesh, None
    return mesh, SlowWay.over(group, mesh, config.slow_axes or profile.slow_axes, part)


def check_fits(plan: Plan, device: torch.device, option: str) -> None:
    """Refuse direct sends on an accelerator, before any collective.

    There, sends and receives are run in the order of a stream: each rank would wait in its first receive for sends that
    nobody gets to. Gloo, which they are for, has no such order.

    Raises:
        ValueError: the plan has direct sends, which the device cannot run; names the option that it comes from.
    """
    if device.type != "cpu" and any(plan.direct):
        raise ValueError(
            f"{option}: '{plan}' sends directly ({DIRECT}), which is for the CPU; valid on {device.type} are plans "
            f"without {DIRECT}, or 'auto'"
        )


def known_of(profile: Profile, device: torch.device, synchronous: bool = False) -> Profile:
    """What counts of a profile on a device.

    Direct sends, measured on a CPU, are not fit for an accelerator; and where it is known that its collectives run one
    by one, nothing overlaps, whatever a profile of another day says.
    """
    if device.type == "cpu":
        return profile
    return replace(profile, direct=None, overlap=0.0 if synchronous else profile.overlap)


def sends_ahead(
    profile: Profile | None, plan_for: Callable[[int], Plan], synchronous: bool
) -> Callable[[int, int], bool]:
    """What :attr:`Mesh.ahead` is to be: the planner's word where a profile is known, else whether anything overlaps."""
    if profile is None:
        return lambda ahead_bytes, all_bytes: not synchronous
    return functools.partial(ahead_pays, profile, plan_for)


def by_trial(mesh: Mesh, profile: Profile, group: dist.ProcessGroup, device: torch.device) -> Callable[[int], Plan]:
    """What chooses a plan for a message of so many bytes, by a trial among all ranks when a size first comes up.

    A trial takes time, and overlap makes messages of many sizes: those nearest to the same power of two share one.
    """
    trials = replace(mesh, traffic=Traffic())
    chosen: dict[int, Plan] = {}

    def choice(message_bytes: int) -> Plan:
        size = 1 << round(math.log2(message_bytes))
        if size not in chosen:
            if torch.compiler.is_compiling():  # nothing can be tried while a graph is traced
                return choose(profile, size)
            # In the lane, where it cannot overtake an exchange that is under way.
            chosen[size] = mesh.lane.run(lambda: _tried(trials, profile, size, group, device))
        return chosen[size]

    return choice


def _tried(mesh: Mesh, profile: Profile, message_bytes: int, group: dist.ProcessGroup, device: torch.device) -> Plan:
    flat, plans = Plan.flat(mesh.topology), contenders(profile, message_bytes)
    if not plans:
        return flat
    once = sum(seconds(profile, plan, message_bytes) for plan in (flat, *plans))
    spent = {effort: once * (math.prod(effort) + 1) for effort in EFFORTS}
    effort = next((effort for effort in EFFORTS if spent[effort] < TRIAL_SECONDS), EFFORTS[-1])
    share = max(1, int(message_bytes / mesh.topology.size * min(1.0, TRIAL_SECONDS / spent[effort])))

    def work(plan: Plan) -> Callable[[], torch.Tensor]:
        message = torch.zeros(*plan.shape, share, dtype=torch.uint8, device=device)
        return functools.partial(mesh.all_to_all, message, plan)

    works = [work(plan) for plan in (flat, *plans)]
    race(works, 1, 1, group, device)  # opens connections and allocates
    by_flat, *others = map(median, race(works, *effort, group, device))
    best = min(range(len(plans)), key=others.__getitem__)
    return plans[best] if others[best] < (1 - MUST_SAVE) * by_flat else flat


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
