"""A cell of the benchmark: a model at one size on some nodes of a machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.accelerator.program import RecordedCollective
from xfuser_cocodiff.engine.topology.link_profile import AxisLink, Profile
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.simulation import assumed_change
from xfuser_cocodiff.tools.simulation.machines import Machine
from xfuser_cocodiff.tools.simulation.scenario import Scenario
from xfuser_cocodiff.tools.simulation.sharding import UNSUPPORTED
from xfuser_cocodiff.tools.simulation.workloads import WORKLOADS, Workload


@dataclass(frozen=True)
class Cell:
    """A model at one size on some nodes of a machine, whose links take the collectives of a recorded step."""

    machine: Machine
    nodes: int
    model: str
    resolution: int
    """Pixels per side of an image, or height of a video."""
    batch: int = 1
    """Number of images or videos."""
    blocks: int = 1
    """Blocks of each kind that are recorded; the last stands for all further ones."""

    def __str__(self) -> str:
        batch = f", batch {self.batch}" if self.batch > 1 else ""
        text = f", {self.workload.text_tokens} text tokens" if self.workload.text_tokens else ""
        return f"{self.machine.name} ({self.topology}), {self.model}, {self.resolution} px{batch}{text}"

    @property
    def topology(self) -> Topology:
        """Topology of all ranks."""
        return self.machine.topology(self.nodes)

    @property
    def workload(self) -> Workload:
        """Dimensions of the model, with the largest number of text tokens up to the pipeline's that xDiT can shard."""
        workload, degree = WORKLOADS[self.model], self.topology.size
        if workload.text_rule != UNSUPPORTED:
            return workload
        return replace(workload, text_tokens=workload.text_tokens // degree * degree)

    @property
    def scenario(self) -> Scenario:
        """The same cell for the simulator."""
        machine, how = self.machine, (self.workload, self.resolution, self.batch, assumed_change.STEPS)
        return Scenario(*how, machine.topology(self.nodes), machine.link_profile, machine.accelerator)

    @property
    def problem(self) -> str | None:
        """Why xDiT cannot run this cell; None if it can."""
        return self.scenario.shard.problem

    @property
    def profile(self) -> Profile:
        """Link profile of all ranks, as the plugin would measure it for the messages of this cell."""
        return self.machine.link_profile(self.topology, self.scenario.message_bytes("q"))

    @property
    def rates(self) -> dict[str, float]:
        """Bytes per second of a rank along each axis."""
        return {axis.name: self._link(axis.name).bytes_per_second for axis in self.topology.axes}

    def axis_to(self, rank: int, own: int = 0) -> str:
        """Return the axis of the link between two ranks: the outermost one on which they differ."""
        return self.spanned_axes((own, rank))[0]

    def spanned_axes(self, ranks: Sequence[int]) -> list[str]:
        """Return the axes along which some ranks differ, outermost first."""
        places = zip(self.topology.axes, zip(*map(self.topology.coordinates, ranks), strict=True), strict=True)
        return [axis.name for axis, each in places if len(set(each)) > 1]

    def latency_seconds(self, ranks: Sequence[int]) -> float:
        """Return the seconds until the first byte of a collective of some ranks moves."""
        axes = [self.axis_to(rank, ranks[0]) for rank in ranks[1:]]
        return self.machine.launch_seconds + sum(self._link(axis).latency_seconds for axis in axes)

    def contention(self, collective: RecordedCollective) -> float:
        """Return the factor by which a collective takes longer than its bytes do: more than 1 for some all-to-alls."""
        crossed = self.spanned_axes(collective.ranks)
        if not collective.is_all_to_all or len(crossed) < 2:
            return 1.0
        spanned = Topology(tuple(axis for axis in self.topology.axes if axis.name in crossed))
        return self.machine.link_profile(spanned, sum(collective.sent)).contention

    def _link(self, axis: str) -> AxisLink:
        return next(link for link in self.machine.links if link.name == axis)
