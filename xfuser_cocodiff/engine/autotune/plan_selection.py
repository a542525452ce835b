"""Plan selection: the mesh of a group, with the plan for each message size and the slow axes."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.autotune import link_probe
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

_QKV = 3
"""Tensors in a message of Q, K and V, of about the same size."""
SIZES = range(6, 40)
"""Exponents of the message sizes, powers of two, for which compiled graphs have plans."""


class PlanTable:
    """The planner's plans by message size, each computed once; sizes with the same nearest power of two share a plan.

    Args:
        profile: link profile that the planner uses.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._choose_plan = functools.cache(functools.partial(planner.choose_plan, profile))
        self.gather = functools.cache(functools.partial(planner.choose_gather_plan, profile))
        """Plan of an all-gather, given the block size in bytes."""

    def __call__(self, message_bytes: int) -> Plan:
        """Return the plan of an all-to-all of this message size."""
        return self._choose_plan(1 << round(math.log2(message_bytes)))

    def table(self) -> tuple[tuple[int, Plan], ...]:
        """Return the plans of all sizes, for compiled graphs; see :attr:`PlanPolicy.graph_plans`."""
        entries: list[tuple[int, Plan]] = []
        for power in SIZES:
            plan, limit = self._choose_plan(1 << power), round(2 ** (power + 0.5))
            if entries and entries[-1][1] == plan:
                entries.pop()
            entries.append((limit, plan))
        return tuple(entries)


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
    synchronous: bool = False
    """Whether the backend blocks the host in each collective, so that nothing overlaps."""
    flat_mesh: Mesh | None = None
    """The same mesh with flat collectives, as in stock xDiT; None if the config names a plan or no links are known."""
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
    setup = CommSetup(mesh, None, cache or TuningCache({}), synchronous=config.synchronous)
    if group.size() == 1:
        return setup
    profile = _link_profile(group, config, device, setup, host_group)
    if measure_codec and config.slow_axes is None:
        profile = _with_codec(profile, config, setup, max_over_all, measure_codec)
    setup.profile = profile
    if profile and config.plan is None:
        setup.flat_mesh = _with_flat_plan(mesh)
        setup.mesh = _with_planner(mesh, profile)
    setup.mesh = _with_early_sends(setup.mesh, profile, config.synchronous)
    if profile and not config.synchronous and devices.capabilities(device.type).is_asynchronous:
        setup.mesh = _with_head_groups(setup.mesh, profile)
    if config.slow_axes != ():
        slow_axes = _measured_slow_axes(profile, max_over_all) if config.slow_axes is None else config.slow_axes
        setup.partition = _partition(group, config, device, setup.mesh, profile, slow_axes)
        if setup.partition and config.slow_axes is None:
            cost = CodingCost.of(profile, setup.partition.slow_axis_names)
            agreed = CodingCost(*max_over_all([cost.link_seconds_per_byte, cost.host_seconds_per_tensor]))
            setup.partition = replace(setup.partition, coding_cost=agreed)
    if not may_gather:
        return setup
    if setup.partition:
        setup.gather = setup.partition if _may_gather(config, setup.partition) else None
        if setup.gather and setup.mesh.policy.splits_heads:
            pays = functools.partial(head_groups.gathered_head_groups_pay, profile, setup.gather.slow_axis_names)
            setup.mesh = replace(setup.mesh, policy=replace(setup.mesh.policy, splits_gathered_heads=pays))
    elif gathered_axes := _lossless_gathered_axes(config, profile, device):
        setup.gather = _partition(group, config, device, setup.mesh, profile, gathered_axes)
        if config.plan is None:
            pays_off = functools.partial(planner.gather_pays, profile, gathered_axes)
            setup.mesh = replace(setup.mesh, policy=replace(setup.mesh.policy, gathers_kv=pays_off))
    return setup


def _plans_of(config: CommConfig) -> list[Plan] | None:
    """Return the plans for which a mesh needs process groups: all if none is named, else the named one, and an
    all-gather if K and V are gathered, perhaps along all axes."""
    if config.plan is None:
        return None
    return [config.plan, *([Plan.hierarchical_gather(config.topology)] if config.plan.gathers_kv else [])]


def _may_gather(config: CommConfig, partition: AxisPartition) -> bool:
    """Return whether coded layers may gather K and V along the slow axes, by the config."""
    return config.gathers_coded and (config.plan is None or config.plan.gathered_axes == partition.slow_axis_names)


def _lossless_gathered_axes(config: CommConfig, profile: Profile | None, device: torch.device) -> tuple[str, ...]:
    """Return the axes along which lossless layers may gather K and V: those that the plan names, else the outermost.

    Where the host itself communicates, nothing is gained, and it is not tried.
    """
    if config.plan:
        return config.plan.gathered_axes
    moving = [axis.name for axis in config.topology.axes if axis.size > 1]
    is_tried = profile and not config.synchronous and devices.capabilities(device.type).is_asynchronous
    return tuple(moving[:1]) if is_tried and len(moving) > 1 else ()


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
    host_group: dist.ProcessGroup | None,
) -> Profile | None:
    """Return the link profile of the config or of the cache; probe the links if one is needed and neither has it."""
    needs_profile = config.plan is None or config.slow_axes is None
    if needs_profile and not (config.profile or setup.cache.profile):
        # The probe needs groups for all axes, and the mesh of a named plan has those of its own stages only.
        probed = _new_mesh(config, device, group, config.topology) if config.plan else setup.mesh
        setup.cache.profile = link_probe.measure_links(probed, device, host_group)
    return config.profile or setup.cache.profile


def _with_codec(
    profile: Profile,
    config: CommConfig,
    setup: CommSetup,
    max_over_all: Callable[[list[float]], list[float]],
    measure_codec: Callable[[], tuple[float, float]],
) -> Profile:
    """Return the profile with the codec's speed, unless no axis of any rank can be slow; keep it in the cache.

    All ranks have the speed in their profile or none, since they share options and cache.
    """
    if profile.codec_bytes_per_second or not max_over_all([float(profile.may_have_slow_axes)])[0]:
        return profile
    speed = measure_codec()
    if not config.profile:
        setup.cache.profile = setup.cache.profile.with_codec(*speed)
    return profile.with_codec(*speed)


def _partition(
    group: dist.ProcessGroup,
    config: CommConfig,
    device: torch.device,
    mesh: Mesh,
    profile: Profile | None,
    slow_axes: list[str] | tuple[str, ...],
) -> AxisPartition | None:
    """Return the slow and fast axes of a mesh, each with a mesh of its own; None if no slow axis has several ranks."""

    def part(part_group: dist.ProcessGroup, topology: Topology) -> Mesh:
        return _with_planner(_new_mesh(config, device, part_group, topology), profile)

    return AxisPartition.over(group, mesh, slow_axes, part)


def _measured_slow_axes(profile: Profile, max_over_all: Callable[[list[float]], list[float]]) -> list[str]:
    names = [axis.name for axis in profile.topology.axes]
    slow = max_over_all([float(name in profile.slow_axes) for name in names])
    return [name for name, is_slow in zip(names, slow, strict=True) if is_slow]


def _with_flat_plan(mesh: Mesh) -> Mesh:
    """Return the mesh with one flat collective for all sizes."""
    flat = Plan.flat(mesh.topology)
    return replace(mesh, policy=PlanPolicy(lambda message_bytes: flat))


def _with_planner(mesh: Mesh, profile: Profile | None) -> Mesh:
    """Return the mesh with the planner's plan for each size; the same mesh without a profile."""
    if profile is None:
        return mesh
    plans = PlanTable(profile.restrict_to(mesh.topology))
    return replace(mesh, policy=PlanPolicy(plans, plans.table(), choose_gather=plans.gather))


def _with_early_sends(mesh: Mesh, profile: Profile | None, synchronous: bool) -> Mesh:
    """Return the mesh with a policy for early sends.

    The planner decides if there is a profile; without one, tensors are always sent early. Nothing is sent early if
    collectives are synchronous.
    """

    def sends_early(early_bytes: int, all_bytes: int) -> bool:
        pays = profile is None or planner.early_send_pays(profile, mesh.policy.choose, early_bytes, all_bytes)
        return pays and not synchronous

    graph_early_bytes = None  # smallest size from which on all larger ones are sent early
    for power in reversed(SIZES):
        if not sends_early(1 << power, _QKV << power):
            break
        graph_early_bytes = 1 << power
    return replace(mesh, policy=replace(mesh.policy, sends_early=sends_early, graph_early_bytes=graph_early_bytes))


def _with_head_groups(mesh: Mesh, profile: Profile) -> Mesh:
    """Return the mesh with a policy for head groups, by the planner. Where the host itself computes and communicates,
    they are only used if they are set."""
    splits_heads = functools.partial(head_groups.head_groups_pay, profile, mesh.policy.choose)
    return replace(mesh, policy=replace(mesh.policy, splits_heads=splits_heads))
