"""What the simulator simulates: a machine, a model and a picture; and what a mode does about it."""

from dataclasses import dataclass

from xfuser_cocodiff.machine import planner
from xfuser_cocodiff.machine.plan import Plan
from xfuser_cocodiff.machine.profile import Profile
from xfuser_cocodiff.simulation.machines import Machine
from xfuser_cocodiff.simulation.workloads import PIXELS_PER_TOKEN, Workload

STOCK = "stock"
BEST = "best"


@dataclass(frozen=True)
class Mode:
    """What a run does differently from stock xDiT."""

    plan: str
    """How an all-to-all runs: as :meth:`Plan.parse` reads it, or 'best' for the planner's choice."""
    v_first: bool = False
    """Whether V's exchange starts before Q and K are projected."""
    qkv_share: tuple[float, float] = (1.0, 1.0)
    """Share of the bytes of Q, K and V that travels on slow axes, at the first and at the last step; linear between."""
    o_share: float = 1.0
    """The same for O, at all steps."""
    selects: bool = False
    """Whether tokens are selected: ranks then gather indices, and read and write a cache for each of Q, K and V. Where
    no axis is slow, nothing is selected."""


MODES = {
    STOCK: Mode("flat"),
    "tapa": Mode("hierarchical"),
    "tapa+vfirst": Mode("hierarchical", v_first=True),
    "exact": Mode(BEST),
    "exact+vfirst": Mode(BEST, v_first=True),
    "paper": Mode("hierarchical", v_first=True, qkv_share=(1.0, 0.0), selects=True),
}


@dataclass(frozen=True)
class Scenario:
    """What is simulated, less the mode."""

    machine: Machine
    nodes: int
    workload: Workload
    resolution: int
    batch: int = 1

    def __post_init__(self) -> None:
        check_count("--nodes", self.nodes)
        check_count("--batch", self.batch)
        check_count("--resolution", self.resolution, PIXELS_PER_TOKEN)

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.nodes * self.machine.ranks_per_node

    @property
    def ulysses_nodes(self) -> int:
        """Nodes that a Ulysses group covers: as many as the heads divide over.

        Raises:
            ValueError: the heads do not even divide over one node.
        """
        per_node, heads = self.machine.ranks_per_node, self.workload.moved_heads
        fitting = [n for n in range(1, self.nodes + 1) if self.nodes % n == 0 and heads % (n * per_node) == 0]
        if not fitting:
            raise ValueError(f"{heads} heads of {self.workload.name} do not divide over the {per_node} ranks of a node")
        return fitting[-1]

    @property
    def ring_degree(self) -> int:
        """Ulysses groups that pass K and V around."""
        return self.nodes // self.ulysses_nodes

    @property
    def message_bytes(self) -> int:
        """Bytes of one of Q, K, V and O on a rank."""
        return self.workload.message_bytes(self.resolution, self.batch, self.ranks)

    @property
    def profile(self) -> Profile:
        """Links of a Ulysses group."""
        return self.machine.profile(self.ulysses_nodes, self.message_bytes)

    def plan(self, mode: Mode) -> Plan:
        """How an all-to-all of a mode runs."""
        if mode.plan == BEST:
            return planner.choose(self.profile, self.message_bytes)
        return Plan.parse(mode.plan, self.profile.topology)

    def compute_seconds(self, flops: float) -> float:
        """Time for `flops` that all ranks share."""
        return flops / self.ranks / self.machine.flops


def check_count(option: str, value: int, multiple: int = 1) -> None:
    """Raise a ValueError unless an option is a positive multiple."""
    if value < 1 or value % multiple:
        what = "1 or more" if multiple == 1 else f"a positive multiple of {multiple}"
        raise ValueError(f"{option} {value} is not valid; it must be {what}")
