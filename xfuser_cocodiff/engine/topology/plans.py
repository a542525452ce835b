"""A plan says how an all-to-all runs: its stages and their order.

A stage is one all-to-all along one axis or along several merged ones: a collective of the backend, or direct sends to
each peer behind receives that were posted first. Gloo's collective posts its sends first; then the word that a rank is
ready to receive queues behind its own data, and the two directions of a link take turns. Direct sends keep both busy,
but each costs a call from Python. Every plan of a topology moves the same values to the same places; which is fastest
depends on the links and on the size, and is the planner's business.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from xfuser_cocodiff.engine.topology.topology import FLAT, Topology

HIERARCHICAL = "hierarchical"
DIRECT = "*"
"""Marks a stage of direct sends."""

Stage = tuple[int, ...]
"""Neighbouring axes that one all-to-all crosses, by number, ascending."""

NOTATION = (
    f"{FLAT!r}, {HIERARCHICAL!r}, or stages in their order such as '{HIERARCHICAL}:tile+gpu,node{DIRECT}' "
    f"({DIRECT}: direct sends)"
)


@dataclass(frozen=True)
class Plan:
    """Stages in the order in which they run; axes of size 1 take part in none."""

    topology: Topology
    stages: tuple[Stage, ...]
    direct: tuple[bool, ...] = ()
    """For each stage whether it sends directly; none of them does when not given."""
    shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Ranks that each stage crosses, outermost first: the leading dims of a buffer that is indexed by rank."""
    dims: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """For each stage its dim in `shape`."""
    labels: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """For each stage its name: 'flat', or its axes, innermost first."""

    def __post_init__(self) -> None:
        # Once for all: they are read at every exchange, and a lazy property's lock would break a traced graph.
        outermost_first = sorted(self.stages)
        derived = {
            "direct": self.direct or (False,) * len(self.stages),
            "shape": tuple(math.prod(self.topology.shape[dim] for dim in stage) for stage in outermost_first),
            "dims": tuple(map(outermost_first.index, self.stages)),
            "labels": tuple(map(self._label, self.stages)),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @classmethod
    def flat(cls, topology: Topology) -> "Plan":
        """One collective over all ranks."""
        return cls(topology, (_moving(topology),))

    @classmethod
    def hierarchical(cls, topology: Topology) -> "Plan":
        """One collective per axis, innermost first, as TAPA has it."""
        return cls(topology, tuple((dim,) for dim in reversed(_moving(topology))) or ((),))

    @classmethod
    def hierarchical_gather(cls, topology: Topology, direct: bool = False) -> "Plan":
        """One stage per axis, outermost first: an all-gather hands on all that has come, so that the slowest links see
        least of it."""
        stages = tuple((dim,) for dim in _moving(topology)) or ((),)
        return cls(topology, stages, direct=(direct,) * len(stages))

    @classmethod
    def parse(cls, text: str, topology: Topology) -> "Plan":
        """Read a plan, as `str` writes it.

        Raises:
            ValueError: not the notation, or stages that do not name every axis of the topology once.
        """
        kind, _, stages = text.strip().partition(":")
        if kind in (FLAT, FLAT + DIRECT) and not stages:
            return replace(cls.flat(topology), direct=(kind.endswith(DIRECT),))
        if kind != HIERARCHICAL or "/" in stages:  # else "node/4" would be said not to name an axis
            raise ValueError(f"{text!r} is not valid; valid are {NOTATION}")
        if not stages:
            return cls.hierarchical(topology)
        numbers = {topology.axes[dim].name: dim for dim in _moving(topology)}
        marked = stages.split(",")
        names = [stage.removesuffix(DIRECT).split("+") for stage in marked]
        if sorted(itertools.chain(*names)) != sorted(numbers):
            raise ValueError(f"{text!r} must name each of the axes {', '.join(numbers)} once")
        found = tuple(tuple(sorted(numbers[name] for name in stage)) for stage in names)
        if set(found) - set(itertools.chain(*_merges(_moving(topology)))):
            raise ValueError(f"{text!r} merges axes that are no neighbours; they are {', '.join(numbers)}")
        direct = tuple(stage.endswith(DIRECT) for stage in marked)
        return cls(topology, found, direct)

    @property
    def is_flat(self) -> bool:
        """Whether one collective does it all."""
        return len(self.stages) == 1

    def sent_bytes(self, message_bytes: float) -> dict[str, float]:
        """Bytes that a rank sends along each axis, by name: a peer belongs to the outermost axis on which it differs.

        Args:
            message_bytes: what a rank holds before the all-to-all, its own share included.
        """
        sent = dict.fromkeys((axis.name for axis in self.topology.axes), 0.0)
        for stage in self.stages:
            share = message_bytes / math.prod(self.topology.shape[dim] for dim in stage)
            for dim in reversed(stage):
                axis = self.topology.axes[dim]
                sent[axis.name] += (axis.size - 1) * share
                share *= axis.size
        return sent

    def gathered_bytes(self, block_bytes: float) -> dict[str, float]:
        """The same of an all-gather of blocks."""
        sent = dict.fromkeys((axis.name for axis in self.topology.axes), 0.0)
        for stage in self.stages:
            for dim in reversed(stage):
                axis = self.topology.axes[dim]
                sent[axis.name] += (axis.size - 1) * block_bytes
                block_bytes *= axis.size
        return sent

    def _label(self, stage: Stage) -> str:
        if self.is_flat and len(stage) != 1:
            return FLAT
        return "+".join(self.topology.axes[dim].name for dim in reversed(stage))

    def __str__(self) -> str:
        marks = [DIRECT if direct else "" for direct in self.direct]
        if self.is_flat:
            return FLAT + marks[0]
        stages = ",".join(label + mark for label, mark in zip(self.labels, marks, strict=True))
        return f"{HIERARCHICAL}:{stages}"


def candidates(topology: Topology) -> list[Plan]:
    """Every plan that the planner considers, by collectives: flat first, then those of fewer stages."""
    partitions = sorted(_merges(_moving(topology)), key=len)
    return [Plan(topology, order) for partition in partitions for order in itertools.permutations(partition[::-1])]


def _merges(dims: Stage) -> Iterator[tuple[Stage, ...]]:
    """All ways to cut neighbouring axes into stages, outermost first: only neighbours merge into one kind of link."""
    cuts = range(1, len(dims))
    for count in range(max(len(dims), 1)):
        for chosen in itertools.combinations(cuts, count):
            yield tuple(dims[start:end] for start, end in itertools.pairwise((0, *chosen, len(dims))))


def _moving(topology: Topology) -> Stage:
    return tuple(dim for dim, axis in enumerate(topology.axes) if axis.size > 1)
