"""Plans: the stages of an all-to-all and their order.

A stage is one collective along one axis or several merged axes. All plans of a topology have the same result; which one
is fastest depends on the links and the message size, and is chosen by the planner.

A plan may say that attention gathers K and V along the outermost axes, so that neither Q nor O crosses them. Where a
layer cannot, its all-to-alls cross these axes in the plan's last stage.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from xfuser_cocodiff.engine.topology.topology import FLAT, Topology

HIERARCHICAL = "hierarchical"
GATHER = "=kv"
"""Mark of the axes along which K and V are gathered."""

HEADS, KV = "heads", "kv"
"""How attention crosses an axis: by all-to-alls that reshard heads, or by an all-gather of K and V."""

Stage = tuple[int, ...]
"""Adjacent axes that one all-to-all crosses, by number, ascending."""

NOTATION = (
    f"{FLAT!r}, {HIERARCHICAL!r}, or stages in their order such as '{HIERARCHICAL}:tile+gpu,node' "
    f"({GATHER} after the last stage: K and V are gathered along the outermost axes)"
)


@dataclass(frozen=True)
class Plan:
    """Stages in the order in which they run; axes of size 1 are in none of them."""

    topology: Topology
    stages: tuple[Stage, ...]
    gathers_kv: bool = False
    """Whether K and V are gathered along the axes of the last stage, which are the outermost."""
    shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Number of ranks in each stage, outermost first: the leading dims of a buffer that is indexed by rank."""
    dims: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Dim in `shape` of each stage."""
    labels: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Name of each stage: 'flat', or its axes, innermost first."""

    def __post_init__(self) -> None:
        # Computed once, because every all-to-all reads them; the lock of a cached property would break a traced graph.
        outermost_first = sorted(self.stages)
        derived = {
            "shape": tuple(math.prod(self.topology.shape[dim] for dim in stage) for stage in outermost_first),
            "dims": tuple(map(outermost_first.index, self.stages)),
            "labels": tuple(map(self._label, self.stages)),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @classmethod
    def flat(cls, topology: Topology) -> "Plan":
        """Return the plan of one collective over all ranks."""
        return cls(topology, (_nontrivial_dims(topology),))

    @classmethod
    def hierarchical(cls, topology: Topology) -> "Plan":
        """Return the plan of one stage per axis, innermost first, as in TAPA."""
        return cls(topology, tuple((dim,) for dim in reversed(_nontrivial_dims(topology))) or ((),))

    @classmethod
    @functools.cache  # for every all-gather without a link profile
    def hierarchical_gather(cls, topology: Topology) -> "Plan":
        """Return the all-gather plan of one stage per axis, outermost first.

        Each stage sends everything gathered so far, so that the slowest links, which come first, carry the least.
        """
        return cls(topology, tuple((dim,) for dim in _nontrivial_dims(topology)) or ((),))

    @classmethod
    def parse(cls, text: str, topology: Topology) -> "Plan":
        """Parse a plan, in the notation that `str` writes.

        Raises:
            ValueError: invalid notation, or stages that do not name every axis of the topology once.
        """
        if "*" in text:  # as in version 0.2
            raise ValueError(f"{text!r} is not valid: direct sends (*) were removed; leave * out")
        kind, _, stages = text.strip().partition(":")
        if kind == FLAT and not stages:
            return cls.flat(topology)
        if kind != HIERARCHICAL or "/" in stages:  # a chunk count of earlier versions, as in "node/4"
            raise ValueError(f"{text!r} is not valid; valid are {NOTATION}")
        if not stages:
            return cls.hierarchical(topology)
        dims = {topology.axes[dim].name: dim for dim in _nontrivial_dims(topology)}
        gathers_kv = stages.endswith(GATHER)
        names = [stage.split("+") for stage in stages.removesuffix(GATHER).split(",")]
        if sorted(itertools.chain(*names)) != sorted(dims):
            raise ValueError(f"{text!r} must name each of the axes {', '.join(dims)} once")
        parsed = tuple(tuple(sorted(dims[name] for name in stage)) for stage in names)
        if set(parsed) - set(itertools.chain(*_partitions(_nontrivial_dims(topology)))):
            raise ValueError(f"{text!r} merges axes that are not adjacent; their order is {', '.join(dims)}")
        if gathers_kv and min(parsed[-1]) != _nontrivial_dims(topology)[0]:
            raise ValueError(f"{text!r} must gather K and V along the outermost axis, {next(iter(dims))}")
        return cls(topology, parsed, gathers_kv)

    @property
    def is_flat(self) -> bool:
        """Whether the plan has a single stage."""
        return len(self.stages) == 1

    @property
    def gathered_axes(self) -> tuple[str, ...]:
        """Names of the axes along which K and V are gathered."""
        return tuple(self.topology.axes[dim].name for dim in self.stages[-1]) if self.gathers_kv else ()

    def _label(self, stage: Stage) -> str:
        if self.is_flat and len(stage) != 1 and not self.gathers_kv:
            return FLAT
        return "+".join(self.topology.axes[dim].name for dim in reversed(stage))

    def __str__(self) -> str:
        if self.is_flat and not self.gathers_kv:
            return FLAT
        return f"{HIERARCHICAL}:{','.join(self.labels)}{GATHER * self.gathers_kv}"


def candidates(topology: Topology) -> list[Plan]:
    """Return every plan that the planner considers: the flat one first, then by number of stages."""
    partitions = sorted(_partitions(_nontrivial_dims(topology)), key=len)
    return [Plan(topology, order) for partition in partitions for order in itertools.permutations(partition[::-1])]


def _partitions(dims: Stage) -> Iterator[tuple[Stage, ...]]:
    """Yield every way to divide axes into stages of adjacent ones, outermost first."""
    cuts = range(1, len(dims))
    for count in range(max(len(dims), 1)):
        for chosen in itertools.combinations(cuts, count):
            yield tuple(dims[start:end] for start, end in itertools.pairwise((0, *chosen, len(dims))))


def _nontrivial_dims(topology: Topology) -> Stage:
    """Return the numbers of the axes with more than one rank."""
    return tuple(dim for dim, axis in enumerate(topology.axes) if axis.size > 1)
