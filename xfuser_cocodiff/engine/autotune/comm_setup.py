"""Setup of communication: the mesh of a group, with the plan for each message size and the slow axes."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.autotune import link_probe, plans_by_size
from xfuser_cocodiff.engine.autotune.comm_config import CommConfig
from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.topology import devices, head_groups, planner
from xfuser_cocodiff.engine.topology.coding_cost import CodingCost
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology


@dataclass
class CommSetup:
    """The communication setup of a group."""

    mesh: Mesh
    partition: AxisPartition | None
    """Slow and fast axes, with a mesh for each; None in lossless mode or without slow axes."""
    cache: TuningCache | None = None
    """Tuning results of the machine."""
    profile: Profile | None = None
    """Link profile, measured or given; None where none is needed."""
    gather: AxisPartition | None = None
    """Partition whose slow side is the axes along which K and V may be gathered; None where they never are. In a lossy
    mode it is :attr:`partition`; in `exact` these axes need not be slow."""


def set_up_comm(
    group: dist.ProcessGroup,
    config: CommConfig,
    device: torch.device,
    cache: TuningCache | None = None,
    max_over_all: Callable[[list[float]], list[float]] = list,
    parent: Mesh | None = None,
    may_gather: bool = True,
    host_group: dist.ProcessGroup | None = None,
    measure_codec: Callable[[], tuple[float, float]] | None = None,
) -> CommSetup:
    """Set up the communication of a group: its mesh, the plans of its messages, and its slow axes.

    Every rank of the group must call this; all of them make the same choices.

    Args:
        group: the ranks.
        config: config of the group. A plan named there is used for all sizes, else the planner chooses one for each.
        device: where messages lie.
        cache: tuning results of the machine. If it has no link profile and one is needed, the links are probed and the
            profile is stored in it.
        max_over_all: elementwise maximum over all ranks of the run. A measured axis is slow if it is slow for any rank:
            with a ring there are several Ulysses groups, which must compress the same axes in the same layers.
        parent: mesh whose comm stream and traffic statistics the new mesh shares.
        may_gather: whether layers may gather K and V along some axes; not in a ring, nor beside one.
        host_group: all ranks of the run, in a group for host memory; the mesh's own when not given.
        measure_codec: returns the codec's bytes per second and its host seconds per tensor, the same on all ranks of
            the run. Called where slow axes are measured and a link is slow enough to be one. Without it, and without
            the figures in the profile, no axis is slow.
    """
    mesh = _new_mesh(config, device, group, config.topology, _plans_of(config))
    if parent:
        mesh = mesh.as_part_of(parent, "+".join(axis.name for axis in reversed(config.topology.axes)))
    setup = CommSetup(mesh, None, cache or TuningCache({}))
    if group.size() == 1:
        return setup
    setup.profile = profile = _link_profile(group, config, device, setup, max_over_all, host_group, measure_codec)
    hides_host = not config.synchronous and devices.capabilities(device.type).is_asynchronous
    slow_axes = _slow_axes(config, profile, max_over_all)
    gathered_axes = _gathered_axes(config, slow_axes, profile is not None and hides_host) if may_gather else ()
    rules = _rules(config, mesh.policy, profile, hides_host)
    if profile and gathered_axes:
        rules = _with_gather_rules(rules, config, profile, slow_axes, gathered_axes)
    setup.mesh = replace(mesh, policy=rules)

    def part(part_group: dist.ProcessGroup, topology: Topology) -> Mesh:
        made = _new_mesh(config, device, part_group, topology)
        return replace(made, policy=plans_by_size.planned(profile.restrict_to(topology))) if profile else made

    partition = functools.partial(AxisPartition.over, group, setup.mesh, make_mesh=part)
    setup.partition = partition(slow_axes)
    if setup.partition and profile and config.slow_axes is None:
        cost = CodingCost.of(profile, slow_axes)
        agreed = CodingCost(*max_over_all([cost.link_seconds_per_byte, cost.host_seconds_per_tensor]))
        setup.partition = replace(setup.partition, coding_cost=agreed)
    setup.gather = setup.partition if slow_axes == gathered_axes else partition(gathered_axes)
    return setup


def _rules(config: CommConfig, given: PlanPolicy, profile: Profile | None, hides_host: bool) -> PlanPolicy:
    """Return the policy of a mesh: the planner's plans or those of the config, early sends, and head groups.

    Args:
        config: config of the group.
        given: policy of the mesh, by the plan of the config if it names one.
        profile: link profile.
        hides_host: whether communication overlaps with the host and the device. Else head groups are only used if they
            are set.
    """
    policy = plans_by_size.planned(profile) if profile and config.plan is None else given
    policy = plans_by_size.with_early_sends(policy, profile, config.synchronous)
    if not (profile and hides_host):
        return policy
    return replace(policy, splits_heads=functools.partial(head_groups.head_groups_pay, profile, policy.choose))


def _with_gather_rules(
    policy: PlanPolicy,
    config: CommConfig,
    profile: Profile,
    slow_axes: tuple[str, ...],
    gathered_axes: tuple[str, ...],
) -> PlanPolicy:
    """Return the policy with rules for gathered K and V: the head groups of coded layers, or whether lossless layers
    try it."""
    if slow_axes and policy.splits_heads:
        pays = functools.partial(head_groups.gathered_head_groups_pay, profile, gathered_axes)
        return replace(policy, splits_heads=pays)
    if not slow_axes and config.plan is None:
        return replace(policy, gathers_kv=functools.partial(planner.gather_pays, profile, gathered_axes))
    return policy


def _plans_of(config: CommConfig) -> list[Plan] | None:
    """Return the plans for which a mesh needs process groups: all if none is named, else the named one, and an
    all-gather if K and V are gathered, perhaps along all axes."""
    if config.plan is None:
        return None
    return [config.plan, *([Plan.hierarchical_gather(config.topology)] if config.plan.gathers_kv else [])]


def _new_mesh(
    config: CommConfig,
    device: torch.device,
    group: dist.ProcessGroup,
    topology: Topology,
    plans: list[Plan] | None = None,
) -> Mesh:
    """Return a mesh over a group, with the timeout of the config."""
    timeout = timedelta(seconds=config.timeout) if config.timeout else None
    return Mesh.over(group, topology, plans, timeout, device)


def _link_profile(
    group: dist.ProcessGroup,
    config: CommConfig,
    device: torch.device,
    setup: CommSetup,
    max_over_all: Callable[[list[float]], list[float]],
    host_group: dist.ProcessGroup | None,
    measure_codec: Callable[[], tuple[float, float]] | None,
) -> Profile | None:
    """Return the link profile of the config or of the cache. Measure what is needed and neither has: the links, and the
    codec's speed unless no axis of any rank can be slow; keep it in the cache.

    All ranks have a profile or none, and the codec's speed in it or not, since they share options and cache.
    """
    profile, measures_axes = config.profile or setup.cache.profile, config.slow_axes is None
    if profile is None and (config.plan is None or measures_axes):
        # The probe needs groups for all axes, and the mesh of a named plan has those of its own stages only.
        probed = _new_mesh(config, device, group, config.topology) if config.plan else setup.mesh
        profile = link_probe.Probe(probed, device, host_group).measure()
    if profile and measures_axes and measure_codec and _needs_codec(profile, max_over_all):
        profile = profile.with_codec(*measure_codec())
    if not config.profile:
        setup.cache.profile = profile
    return profile


def _needs_codec(profile: Profile, max_over_all: Callable[[list[float]], list[float]]) -> bool:
    """Return whether the codec's speed, which is unknown, decides if an axis of some rank is slow."""
    return not profile.codec_bytes_per_second and bool(max_over_all([float(profile.may_have_slow_axes)])[0])


def _slow_axes(
    config: CommConfig, profile: Profile | None, max_over_all: Callable[[list[float]], list[float]]
) -> tuple[str, ...]:
    """Return the slow axes with several ranks: those of the config, else those that are slow for any rank."""
    moving, names = config.topology.moving_axes, config.slow_axes
    if names is None:
        assert profile  # measured for this
        is_slow = max_over_all([float(name in profile.slow_axes) for name in moving])
        names = tuple(itertools.compress(moving, is_slow))
    return tuple(name for name in moving if name in names)


def _gathered_axes(config: CommConfig, slow_axes: tuple[str, ...], tries_lossless: bool) -> tuple[str, ...]:
    """Return the axes along which layers may gather K and V: coded ones along the slow axes; lossless ones along those
    that the plan names, else the outermost.

    Args:
        config: config of the group.
        slow_axes: the slow axes.
        tries_lossless: whether lossless layers may gain from it. Where the host itself communicates, they do not.
    """
    if slow_axes:
        is_allowed = config.gathers_coded and (config.plan is None or config.plan.gathered_axes == slow_axes)
        return slow_axes if is_allowed else ()
    if config.plan:
        return config.plan.gathered_axes
    moving = config.topology.moving_axes
    return moving[:1] if tries_lossless and len(moving) > 1 else ()
