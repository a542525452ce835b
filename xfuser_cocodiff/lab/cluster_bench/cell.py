"""A cell of the benchmark: a model at one size on some nodes of a machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.accelerator.program import RecordedCollective
from xfuser_cocodiff.lab.simulation.machines import Machine
from xfuser_cocodiff.lab.simulation.scenario import Scenario
from xfuser_cocodiff.lab.simulation.sharding import RULES, UNSUPPORTED
from xfuser_cocodiff.lab.simulation.simulate import scenario_on_nodes
from xfuser_cocodiff.lab.simulation.workloads import WORKLOADS, Workload


@dataclass(frozen=True)
class Cell:
    """A model at one size on some nodes of a machine."""

    machine: Machine
    nodes: int
    model: str
    resolution: int
    """Pixels per side of an image, or height of a video."""
    batch: int = 1
    """Number of images or videos."""
    blocks: int = 1
    """Blocks of each kind that are emulated; the last stands for all further ones."""
    text_tokens: int | None = None
    """Text tokens of the prompt; None for the pipeline's, or the largest number below that xDiT can shard."""

    @property
    def topology(self) -> Topology:
        """Topology of all ranks."""
        return self.machine.topology(self.nodes)

    @property
    def workload(self) -> Workload:
        """Dimensions of the model, with the text tokens of this cell."""
        workload, degree = WORKLOADS[self.model], self.topology.size
        tokens = self.text_tokens or workload.text_tokens
        if self.text_tokens is None and RULES[self.model].text == UNSUPPORTED:
            tokens = max(tokens // degree, 1) * degree
        return replace(workload, text_tokens=tokens)

    @property
    def scenario(self) -> Scenario:
        """The same cell for the simulator."""
        return scenario_on_nodes(self.machine, self.nodes, self.workload, self.resolution, self.batch)

    @property
    def profile(self) -> Profile:
        """Link profile of all ranks, as the plugin would measure it for the messages of this cell."""
        return self.machine.link_profile(self.topology, self.scenario.message_bytes("q"))

    def latency_seconds(self, ranks: Sequence[int]) -> float:
        """Return the seconds until the first byte of a collective of some ranks moves."""
        topology, own = self.topology, self.topology.coordinates(ranks[0])
        latency = self.machine.launch_seconds
        for rank in ranks[1:]:
            axis = self._outermost_axis(own, topology.coordinates(rank))
            latency += self._link_latency(axis)
        return latency

    def contention(self, collective: RecordedCollective) -> float:
        """Return the factor by which a collective takes longer than its bytes do: more than 1 for some all-to-alls."""
        if not collective.is_all_to_all:
            return 1.0
        coordinates = [self.topology.coordinates(rank) for rank in collective.group.members(0)]
        crossed = [
            axis.name
            for axis, places in zip(self.topology.axes, zip(*coordinates, strict=True), strict=True)
            if len(set(places)) > 1
        ]
        if len(crossed) < 2:
            return 1.0
        spanned = Topology(tuple(axis for axis in self.topology.axes if axis.name in crossed))
        return self.machine.link_profile(spanned, sum(collective.sent)).contention

    def _outermost_axis(self, own: tuple[int, ...], other: tuple[int, ...]) -> str:
        axes = zip(self.topology.axes, own, other, strict=True)
        return next(axis.name for axis, here, there in axes if here != there)

    def _link_latency(self, axis: str) -> float:
        return next(link.latency_seconds for link in self.machine.links if link.name == axis)
