"""The plan of each exchange: what the user fixed, what the planner chooses, or what a trial confirms of its choice.

A model of the links has errors, above all where a message takes about as long by several plans. So for the sizes that
come up, the plans that the model finds best are tried against the flat collective, on a message of that size. A trial
is never made while an exchange waits for its plan: until somebody has time for it, the planner's choice stands.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from xfuser_cocodiff import device as devices
from xfuser_cocodiff.collectives import Mesh
from xfuser_cocodiff.config import CocoDiffConfig
from xfuser_cocodiff.findings import Findings
from xfuser_cocodiff.options import EXACT
from xfuser_cocodiff.plan import DIRECT, Plan, candidates
from xfuser_cocodiff.planner import ahead_pays, choose, ranking, seconds
from xfuser_cocodiff.probe import ROUNDS, Probe
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
"""How many calls a trial times in a row, and how often: the first for which there is time."""
FEW_ROUNDS = 2
"""How often a figure is taken where a run waits for it."""
SIZES = range(6, 40)
"""Powers of two for which graphs know plans."""


class Plans:
    """The plan for each size: what a trial has settled, or else what the planner chooses. All ranks of the group must
    call it alike.

    Messages of many sizes come up; those nearest to the same power of two share a plan.

    Args:
        topology: of the ranks.
        profile: what the planner goes by; until there is one, everything is flat.
        settled: plans that are settled already; further ones are added to it.
        is_tried: whether plans are to be tried.
    """

    def __init__(
        self,
        topology: Topology,
        profile: Profile | None = None,
        settled: dict[int, Plan] | None = None,
        is_tried: bool = True,
    ) -> None:
        self._flat, self._is_tried = Plan.flat(topology), is_tried
        self.settled: dict[int, Plan] = {} if settled is None else settled
        """Plans by size, a power of two, that a trial has found or confirmed."""
        self.asked: Counter[int] = Counter()
        """How often a plan was asked for, by size."""
        self.learn(profile)

    def learn(self, profile: Profile | None) -> None:
        """Go by another profile from now on."""
        self.profile = profile
        self._chosen: dict[int, Plan] = {}
        self._contenders: dict[int, list[Plan]] = {}
        self._left: set[int] = set()

    def __call__(self, message_bytes: int) -> Plan:
        """The plan for a message of so many bytes."""
        self.asked[_nearest(message_bytes)] += 1
        return self.would_be(message_bytes)

    def would_be(self, message_bytes: int) -> Plan:
        """The plan that a message of so many bytes would go by, if there were one."""
        size = _nearest(message_bytes)
        return self.settled.get(size) or self._choice(size)

    def _choice(self, size: int) -> Plan:
        if self.profile is None:
            return self._flat
        if size not in self._chosen:
            self._chosen[size] = choose(self.profile, size)
        return self._chosen[size]

    def contenders(self, size: int) -> list[Plan]:
        """See :func:`contenders`."""
        if size not in self._contenders:
            self._contenders[size] = contenders(self.profile, size)
        return self._contenders[size]

    @property
    def open(self) -> list[int]:
        """Sizes that came up and were not tried, those first for which most bytes were sent; none that nothing is known
        of."""
        if self.profile is None or not self._is_tried:
            return []
        untried = self.asked.keys() - self.settled.keys() - self._left
        return sorted(untried, key=lambda size: (-size * self.asked[size], size))

    def leave(self, size: int) -> None:
        """Leave a size to the planner: there is no time to try it."""
        self._left.add(size)

    def table(self) -> tuple[tuple[int, Plan], ...]:
        """What is known now, for graphs: see :attr:`Mesh.traced`."""
        found: list[tuple[int, Plan]] = []
        for power in SIZES:
            plan, limit = self.settled.get(1 << power) or self._choice(1 << power), round(2 ** (power + 0.5))
            if found and found[-1][1] == plan:
                found.pop()
            found.append((limit, plan))
        return tuple(found)


def _nearest(message_bytes: int) -> int:
    return 1 << round(math.log2(message_bytes))


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
        return [mesh for mesh in found if isinstance(mesh.choose, Plans)]

    def go_on(self) -> None:
        """Measure one piece more of what is to be known of the links, and go by it. All ranks must call this."""
        # In the lane, where it cannot overtake an exchange that is under way.
        self.mesh.lane.run(self.probe.go_on)
        profile = self.probe.profile
        for mesh in self.meshes if profile else ():
            mesh.choose.learn(known_of(profile, mesh.lane.device, self.synchronous).along(mesh.topology))
        if not self.probe.missing:
            self.known.profile, self.probe = profile, None


def planned_mesh(
    group: dist.ProcessGroup,
    config: CocoDiffConfig,
    device: torch.device,
    known: Findings | None = None,
    largest: Callable[[list[float]], list[float]] = list,
    at_once: bool = True,
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
    """
    if config.plan:
        check_fits(config.plan, device, "--cocodiff_a2a")
    plans = [config.plan] if config.plan else candidates(config.topology)
    timeout = timedelta(seconds=config.timeout) if config.timeout else None
    mesh = Mesh.over(group, config.topology, plans, timeout=timeout, device=device)
    known, probe = known or Findings({}), None
    if config.profile is None and known.profile is None and _asks(config):
        every = mesh if config.plan is None else Mesh.over(group, config.topology, timeout=timeout, device=device)
        probe = Probe(every, group, device, known.samples, ROUNDS if at_once else FEW_ROUNDS)
        probed = _probed(probe, config, at_once)
        known.profile = None if probe.missing else probed
        probe = probe if probe.missing else None
    profile = config.profile or known.profile or (probe and probe.profile)
    profile = profile and known_of(profile, device, config.synchronous)

    def choosing(mesh: Mesh) -> Mesh:
        if config.profile:
            chosen = Plans(mesh.topology, profile.along(mesh.topology), is_tried=False)
        elif _asks(config):
            along = profile and profile.along(mesh.topology)
            chosen = Plans(mesh.topology, along, known.plans_of(mesh.topology))
        else:
            return mesh
        # What graphs go by takes a while to find for all sizes, and is of use to few of those who cannot wait.
        return replace(mesh, choose=chosen, traced=chosen.table() if at_once else ((0, Plan.flat(mesh.topology)),))

    def part(group: dist.ProcessGroup, topology: Topology) -> Mesh:
        return choosing(Mesh.over(group, topology, timeout=timeout, device=device))

    if config.plan is None:
        mesh = choosing(mesh)
    would_be = mesh.choose.would_be if isinstance(mesh.choose, Plans) else mesh.choose
    mesh = replace(mesh, ahead=sends_ahead(profile, would_be, config.synchronous))
    if config.mode == EXACT:
        return Planned(mesh, None, probe, known, config.synchronous)
    slow = config.slow_axes or _slow_axes(profile, largest)
    return Planned(mesh, SlowWay.over(group, mesh, slow, part), probe, known, config.synchronous)


def _probed(probe: Probe, config: CocoDiffConfig, at_once: bool) -> Profile | None:
    """What is known of the links when all is measured that must be: for slow axes, speeds."""
    needs_slow_axes = config.mode != EXACT and config.slow_axes is None
    while probe.missing and (at_once or (needs_slow_axes and probe.profile is None)):
        probe.go_on()
    return probe.profile


def _asks(config: CocoDiffConfig) -> bool:
    """Whether settings leave something to what is known of the links."""
    return config.plan is None or (config.mode != EXACT and config.slow_axes is None)


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
    """What :attr:`Mesh.ahead` is to be: the planner's word where a profile is known, else whether anything overlaps."""
    if profile is None:
        return lambda ahead_bytes, all_bytes: not synchronous
    return functools.partial(ahead_pays, profile, plan_for)


def trial_seconds(plans: Plans, size: int, effort: tuple[int, int]) -> float:
    """How long a trial of a size takes, as far as the model knows."""
    tried = [Plan.flat(plans.profile.topology), *plans.contenders(size)]
    return sum(seconds(plans.profile, plan, size) for plan in tried) * (math.prod(effort) + 1)


def tried(
    mesh: Mesh, plans: Plans, size: int, effort: tuple[int, int], group: dist.ProcessGroup, device: torch.device
) -> Plan:
    """The plan that is fastest for a size, found by a trial among all ranks, each of which must call this.

    Args:
        mesh: what the plans are of. Nothing may be under way in it.
        plans: that it chooses by.
        size: of the message, in bytes.
        effort: calls in a row, and rounds.
        group: all ranks of the mesh.
        device: where messages lie.
    """
    trials, flat = replace(mesh, traffic=Traffic()), Plan.flat(mesh.topology)
    others = plans.contenders(size)
    if not others:
        return flat

    share = max(1, size // mesh.topology.size)
    message = torch.zeros(mesh.topology.size * share, dtype=torch.uint8, device=device)

    def work(plan: Plan) -> Callable[[], torch.Tensor]:
        return functools.partial(trials.all_to_all, message.view(*plan.shape, share), plan)

    works = [work(plan) for plan in (flat, *others)]
    race(works, 1, 1, group, device)  # opens connections and allocates
    by_flat, *by_others = map(median, race(works, *effort, group, device))
    best = min(range(len(others)), key=by_others.__getitem__)
    return others[best] if by_others[best] < (1 - MUST_SAVE) * by_flat else flat


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
