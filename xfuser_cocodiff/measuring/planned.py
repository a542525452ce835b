"""The mesh of an engine: how its exchanges come by their plans, and what is still to be found of its links."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from xfuser_cocodiff.codec.slow_way import SlowWay
from xfuser_cocodiff.exchange.mesh import Mesh
from xfuser_cocodiff.exchange.policy import Policy
from xfuser_cocodiff.machine import device as devices
from xfuser_cocodiff.machine.plan import DIRECT, Plan, candidates
from xfuser_cocodiff.machine.planner import ahead_pays, goes_at_once
from xfuser_cocodiff.machine.profile import Profile
from xfuser_cocodiff.machine.topology import Topology
from xfuser_cocodiff.measuring.choice import SIZES, Plans
from xfuser_cocodiff.measuring.findings import Findings
from xfuser_cocodiff.measuring.probe import ROUNDS, Probe
from xfuser_cocodiff.settings.config import MEASURED, CocoDiffConfig
from xfuser_cocodiff.settings.options import EXACT

_TENSORS = 3
"""In a message of Q, K and V, about as large as each other."""
FEW_ROUNDS = 2
"""How often a figure is taken where a run waits for it."""


@dataclass
class Planned:
    """What the exchanges of a group go by."""

    mesh: Mesh
    way: SlowWay | None
    """Its slow axes, where the mode of the settings approximates; their exchanges go by plans of their own."""
    probe: Probe | None = None
    """What is still to be measured of the links; None where nothing is."""
    known: Findings | None = None
    """What is found of the machine."""
    synchronous: bool = False
    """Whether it runs collectives one by one."""

    @property
    def meshes(self) -> list[Mesh]:
        """Those that choose plans."""
        parts = [self.way.slow, self.way.fast] if self.way else []
        found = [self.mesh, *(part for part in parts if part is not None and part is not self.mesh)]
        return [mesh for mesh in found if isinstance(mesh.policy.choose, Plans)]

    def go_on(self) -> None:
        """Measure one piece more of what is to be known of the links, and go by it. All ranks must call this."""
        # In the lane, where it cannot overtake an exchange that is under way.
        self.mesh.lane.run(self.probe.go_on)
        profile = self.probe.profile
        for mesh in self.meshes if profile else ():
            plans_of(mesh).learn(known_of(profile, mesh.lane.device, self.synchronous).along(mesh.topology))
        if not self.probe.missing:
            self.known.profile, self.probe = profile, None


def plans_of(mesh: Mesh) -> Plans:
    """Those of a mesh that chooses plans."""
    return cast(Plans, mesh.policy.choose)


def planned_mesh(
    group: dist.ProcessGroup,
    config: CocoDiffConfig,
    device: torch.device,
    known: Findings | None = None,
    largest: Callable[[list[float]], list[float]] = list,
    at_once: bool = True,
    beside: Mesh | None = None,
) -> Planned:
    """A mesh over a group that runs by the plan of the settings, or else chooses one for each size; and its slow axes.

    Every rank of the group must call this. With a profile in the settings the planner's choice stands; otherwise the
    links are probed, and choices are to be confirmed by trials. Either way all ranks choose the same.

    Args:
        group: the ranks.
        config: the settings.
        device: where messages lie.
        known: what was found of the machine before, such as its links, which then are not probed again. What is found
            here is added to it.
        largest: given numbers, the largest of all ranks for each. An axis is slow if it is slow for any of them: beside
            a ring there are other groups, which must code alike.
        at_once: whether links are probed now; else somebody does it later. Then everything is flat at first, in graphs
            for good, and only what settles slow axes is measured now.
        beside: another mesh, whose lane and account are to be this one's too.
    """
    if config.plan:
        check_fits(config.plan, device, "--cocodiff_a2a")
    known = known or Findings({})
    timeout = timedelta(seconds=config.timeout) if config.timeout else None

    def over(group: dist.ProcessGroup, topology: Topology, plans: list[Plan] | None = None) -> Mesh:
        return Mesh.over(group, topology, plans, timeout=timeout, device=device)

    plans = [config.plan] if config.plan else candidates(config.topology)
    mesh, probe = over(group, config.topology, plans), None
    if beside:
        mesh = mesh.within(beside, "+".join(axis.name for axis in reversed(config.topology.axes)))
    moves = group.size() > 1
    if moves and config.profile is None and known.profile is None and _asks(config):
        every = mesh if config.plan is None else over(group, config.topology)
        probe = _begun(Probe(every, group, device, known.samples, ROUNDS if at_once else FEW_ROUNDS), config, at_once)
        if not probe.missing:
            known.profile, probe = probe.profile, None
    profile = config.profile or known.profile or (probe.profile if probe else None)
    profile = profile and known_of(profile, device, config.synchronous)

    def choosing(mesh: Mesh) -> Mesh:
        return _choosing(mesh, config, profile, known, at_once)

    if config.plan is None:
        mesh = choosing(mesh)
    choose = mesh.policy.choose
    would_be = choose.would_be if isinstance(choose, Plans) else choose
    ahead = sends_ahead(profile, would_be, config.synchronous)
    traced_ahead = _from_where(lambda size: ahead(size, _TENSORS * size))
    mesh = replace(mesh, policy=replace(mesh.policy, ahead=ahead, traced_ahead=traced_ahead))
    way = None
    if config.mode != EXACT and moves:
        slow = _slow_axes(profile, largest) if config.slow_axes == MEASURED else config.slow_axes
        way = SlowWay.over(group, mesh, slow, lambda group, topology: choosing(over(group, topology)))
        way = way and replace(way, goes_at_once=functools.partial(_goes_at_once, mesh, slow))
    return Planned(mesh, way, probe, known, config.synchronous)


def _goes_at_once(mesh: Mesh, slow_axes: Sequence[str], message_bytes: int) -> bool:
    """What :attr:`SlowWay.goes_at_once` is to be: the planner's word, where plans are left to it and it knows the
    links. A plan of the settings is for exchanges as they are, and coded ones keep to stages."""
    choose = mesh.policy.choose
    profile = choose.profile if isinstance(choose, Plans) else None
    return profile is not None and goes_at_once(profile, message_bytes, slow_axes)


def _begun(probe: Probe, config: CocoDiffConfig, at_once: bool) -> Probe:
    """A probe that has measured what must be known now: for slow axes, speeds."""
    needs_slow_axes = config.mode != EXACT and config.slow_axes == MEASURED
    while probe.missing and (at_once or (needs_slow_axes and probe.profile is None)):
        probe.go_on()
    return probe


def _choosing(mesh: Mesh, config: CocoDiffConfig, profile: Profile | None, known: Findings, at_once: bool) -> Mesh:
    """A mesh that chooses a plan for each size, where the settings leave it to what is known of the links."""
    if not _asks(config):
        return mesh
    along = profile and profile.along(mesh.topology)
    # With a profile in the settings nothing is tried, and what others have found by trying does not count.
    settled = None if config.profile else known.plans_of(mesh.topology)
    chosen = Plans(mesh.topology, along, settled, is_tried=config.profile is None)
    # What graphs go by takes a while to find for all sizes, and is of use to few of those who cannot wait.
    traced = chosen.table() if at_once else ((0, Plan.flat(mesh.topology)),)
    return replace(mesh, policy=Policy(chosen, traced, gather=functools.partial(_gather, chosen, mesh.lane.device)))


def _gather(plans: Plans, device: torch.device, block_bytes: int) -> Plan | None:
    """The plan of an all-gather, once all is known of the links."""
    if plans.profile is None or (plans.profile.direct is None and devices.of(device.type).sends_directly):
        return None
    return plans.gather(block_bytes)


def _asks(config: CocoDiffConfig) -> bool:
    """Whether settings leave something to what is known of the links."""
    return config.plan is None or (config.mode != EXACT and config.slow_axes == MEASURED)


def _slow_axes(profile: Profile, largest: Callable[[list[float]], list[float]]) -> list[str]:
    names = [axis.name for axis in profile.topology.axes]
    slow = largest([float(name in profile.slow_axes) for name in names])
    return [name for name, is_slow in zip(names, slow, strict=True) if is_slow]


def check_fits(plan: Plan, device: torch.device, option: str) -> None:
    """Refuse direct sends on an accelerator, before any collective.

    There, sends and receives are run in the order of a stream: each rank would wait in its first receive for sends that
    nobody gets to. Gloo, which they are for, has no such order.

    Raises:
        ValueError: the plan has direct sends, which the device cannot run; names the option that it comes from.
    """
    if any(plan.direct) and not devices.of(device.type).sends_directly:
        raise ValueError(
            f"{option}: '{plan}' sends directly ({DIRECT}), which is for the CPU; valid on {device.type} are plans "
            f"without {DIRECT}, or 'auto'"
        )


def known_of(profile: Profile, device: torch.device, synchronous: bool = False) -> Profile:
    """What counts of a profile on a device.

    Direct sends, measured on a CPU, are not fit for an accelerator; and where it is known that its collectives run one
    by one, nothing overlaps, whatever a profile of another day says.
    """
    if devices.of(device.type).sends_directly:
        return profile
    return replace(profile, direct=None, overlap=0.0 if synchronous else profile.overlap)


def sends_ahead(
    profile: Profile | None, plan_for: Callable[[int], Plan], synchronous: bool
) -> Callable[[int, int], bool]:
    """What :attr:`Policy.ahead` is to be: the planner's word with a profile, else whether anything overlaps."""
    if profile is None:
        return lambda ahead_bytes, all_bytes: not synchronous
    return functools.partial(ahead_pays, profile, plan_for)


def _from_where(pays: Callable[[int], bool]) -> int | None:
    """The power of two from which on something pays, up to the largest that graphs know; None where there is none."""
    found = None
    for power in reversed(SIZES):
        if not pays(1 << power):
            break
        found = 1 << power
    return found
