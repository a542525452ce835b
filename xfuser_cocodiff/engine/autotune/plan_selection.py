"""The mesh of an engine: how its exchanges come by their plans."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.autotune import link_probe
from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.settings.config import MEASURED_SLOW_AXES, CocoDiffConfig
from xfuser_cocodiff.engine.settings.options import EXACT
from xfuser_cocodiff.engine.topology import devices as devices
from xfuser_cocodiff.engine.topology import planner
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.plans import DIRECT, Plan

_TENSORS = 3
"""In a message of Q, K and V, about as large as each other."""
SIZES = range(6, 40)
"""Powers of two for which graphs know plans."""


class Plans:
    """The planner's choices, each made once; sizes nearest to the same power of two share a plan.

    Args:
        profile: what the planner goes by.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._choose = functools.cache(functools.partial(planner.choose, profile))
        self.gather = functools.cache(functools.partial(planner.choose_gather, profile))
        """The plan of an all-gather of blocks of so many bytes."""

    def __call__(self, message_bytes: int) -> Plan:
        """Return the plan for a message of so many bytes."""
        return self._choose(1 << round(math.log2(message_bytes)))

    def table(self) -> tuple[tuple[int, Plan], ...]:
        """Return all of them, for graphs; see :attr:`PlanPolicy.graph_plans`."""
        found: list[tuple[int, Plan]] = []
        for power in SIZES:
            plan, limit = self._choose(1 << power), round(2 ** (power + 0.5))
            if found and found[-1][1] == plan:
                found.pop()
            found.append((limit, plan))
        return tuple(found)


@dataclass
class Planned:
    """What the exchanges of a group go by."""

    mesh: Mesh
    way: AxisPartition | None
    """Its slow axes, where the mode of the settings approximates; their exchanges go by plans of their own."""
    known: TuningCache | None = None
    """What is found of the machine."""
    synchronous: bool = False
    """Whether it runs collectives one by one."""
    flat: Mesh | None = None
    """The mesh by flat collectives, as stock has them; None where the settings have a plan."""


def planned_mesh(
    group: dist.ProcessGroup,
    config: CocoDiffConfig,
    device: torch.device,
    known: TuningCache | None = None,
    largest: Callable[[list[float]], list[float]] = list,
    beside: Mesh | None = None,
) -> Planned:
    """Return a mesh over a group that runs by the plan of the settings, or else by the planner's for each size; and its
    slow axes. Every rank of the group must call this; all of them choose the same.

    Args:
        group: the ranks.
        config: the settings.
        device: where messages lie.
        known: what was found of the machine before. Where it lacks the links, and the settings leave something to them,
            they are probed, and added to it.
        largest: given numbers, the largest of all ranks for each. A measured axis is slow if it is for any of them:
            beside a ring there are other groups, which must code the same axes.
        beside: another mesh, whose lane and account are to be this one's too.
    """
    if config.plan:
        check_fits(config.plan, device, "--cocodiff_a2a")
    timeout = timedelta(seconds=config.timeout) if config.timeout else None
    over = functools.partial(Mesh.over, timeout=timeout, device=device)
    mesh = over(group, config.topology, [config.plan] if config.plan else None)
    if beside:
        mesh = mesh.as_part_of(beside, "+".join(axis.name for axis in reversed(config.topology.axes)))
    known = known or TuningCache({})
    if group.size() == 1:
        return Planned(mesh, None, known, config.synchronous)
    if _needs_links(config) and not (config.profile or known.profile):
        every = over(group, config.topology) if config.plan else mesh
        known.profile = link_probe.measure(every, device)
    profile = config.profile or known.profile
    profile = profile and known_of(profile, device)
    flat, plan = None, config.plan
    if profile and plan is None:
        plans = [Plan.flat(mesh.topology)]
        flat = replace(mesh, policy=PlanPolicy(lambda message_bytes: plans[0]))
        mesh = _choosing(mesh, profile)
    mesh = _sending_ahead(mesh, profile, config.synchronous)
    way = None
    if config.mode != EXACT:
        slow = _measured_slow_axes(profile, largest) if _measures_slow_axes(config) else config.slow_axes
        way = AxisPartition.over(group, mesh, slow, lambda *part: _choosing(over(*part), profile))
        if way and profile and plan is None:  # a plan of the settings is for exact exchanges; coded ones keep to stages
            way = replace(way, is_single_stage=functools.partial(planner.is_single_stage, profile, slow_axes=slow))
    return Planned(mesh, way, known, config.synchronous, flat)


def _measures_slow_axes(config: CocoDiffConfig) -> bool:
    return config.mode != EXACT and config.slow_axes == MEASURED_SLOW_AXES


def _needs_links(config: CocoDiffConfig) -> bool:
    """Whether settings leave something to what is known of the links."""
    return config.plan is None or _measures_slow_axes(config)


def _measured_slow_axes(profile: Profile, largest: Callable[[list[float]], list[float]]) -> list[str]:
    names = [axis.name for axis in profile.topology.axes]
    slow = largest([float(name in profile.slow_axes) for name in names])
    return [name for name, is_slow in zip(names, slow, strict=True) if is_slow]


def _choosing(mesh: Mesh, profile: Profile | None) -> Mesh:
    """The mesh, with the planner's choice for each size once the links are known."""
    if profile is None:
        return mesh
    plans = Plans(profile.along(mesh.topology))
    # On a CPU a profile of an accelerator's links says nothing of direct sends, by which others gather here.
    gathers = profile.direct is not None or not devices.capabilities(mesh.comm_stream.device.type).supports_direct_sends
    policy = PlanPolicy(plans, plans.table(), gather=plans.gather if gathers else lambda block_bytes: None)
    return replace(mesh, policy=policy)


def _sending_ahead(mesh: Mesh, profile: Profile | None, synchronous: bool) -> Mesh:
    """The mesh, with what decides whether a tensor is sent ahead: the planner where there is a profile, unless nothing
    overlaps."""

    def ahead(ahead_bytes: int, all_bytes: int) -> bool:
        pays = profile is None or planner.ahead_pays(profile, mesh.policy.choose, ahead_bytes, all_bytes)
        return pays and not synchronous

    traced = None  # from where on it pays, for graphs
    for power in reversed(SIZES):
        if not ahead(1 << power, _TENSORS << power):
            break
        traced = 1 << power
    return replace(mesh, policy=replace(mesh.policy, sends_early=ahead, graph_early_bytes=traced))


def check_fits(plan: Plan, device: torch.device, option: str) -> None:
    """Refuse direct sends on an accelerator, before any collective.

    There, sends and receives are run in the order of a stream: each rank would wait in its first receive for sends that
    nobody gets to. Gloo, which they are for, has no such order.

    Raises:
        ValueError: the plan has direct sends, which the device cannot run; names the option that it comes from.
    """
    if any(plan.direct) and not devices.capabilities(device.type).supports_direct_sends:
        raise ValueError(
            f"{option}: '{plan}' sends directly ({DIRECT}), which is for the CPU; valid on {device.type} are plans "
            f"without {DIRECT}, or 'auto'"
        )


def known_of(profile: Profile, device: torch.device) -> Profile:
    """Return a profile as it applies to a device: accelerators have no direct sends, which are measured on CPUs."""
    return profile if devices.capabilities(device.type).supports_direct_sends else replace(profile, direct=None)
