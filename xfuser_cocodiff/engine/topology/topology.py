"""Topologies: named axes that describe how the ranks of a group nest into nodes, GPUs and tiles.

Ranks are numbered with the innermost axis fastest, as by launchers and xDiT: in ``node=2,gpu=3,tile=2`` ranks 0 and 1
are the tiles of one GPU, and ranks 0 and 6 have the same position on two nodes. Everything here is arithmetic.
"""

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

AXIS_NAMES = ("node", "gpu", "tile")
"""Names of axes by position in a notation without names, outermost first."""
NESTING = ("node", "socket", "switch", "gpu", "tile")
"""Names of all axes, outermost first."""

FLAT = "flat"
"""Name of the single axis of a flat topology."""

NOTATION = f"{FLAT!r}, sizes such as '2x3x2' (outermost first), or names such as 'node=2,gpu=3,tile=2'"


@dataclass(frozen=True)
class Axis:
    """One level of a topology."""

    name: str
    size: int


@dataclass(frozen=True)
class Topology:
    """Axes, outermost first. A flat topology has the single axis ``flat``."""

    axes: tuple[Axis, ...]
    shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Axis sizes, outermost first."""
    size: int = field(init=False, repr=False, compare=False)
    """Number of ranks."""

    def __post_init__(self) -> None:
        # Computed once, because every all-to-all reads them.
        object.__setattr__(self, "shape", tuple(axis.size for axis in self.axes))
        object.__setattr__(self, "size", math.prod(self.shape))

    @classmethod
    def flat(cls, size: int) -> "Topology":
        """Return the topology of `size` ranks without levels."""
        return cls((Axis(FLAT, size),))

    @classmethod
    def named(cls, **sizes: int) -> "Topology":
        """Return the topology of named axes, in nesting order: ``Topology.named(tile=2, node=4)``."""
        return cls(tuple(Axis(name, sizes[name]) for name in NESTING if name in sizes))

    @classmethod
    def parse(cls, text: str, size: int | None = None) -> "Topology":
        """Parse a topology.

        Args:
            text: 'flat', '2x3x2' or 'node=2,gpu=3,tile=2'.
            size: number of ranks that the axis sizes must multiply to; any when not given.

        Raises:
            ValueError: invalid notation, an unknown or repeated axis, or sizes that do not multiply to `size`.
        """
        text = text.strip()
        if text == FLAT and size:
            return cls.flat(size)
        topology = cls.named(**_parse_sizes(text))
        if size and topology.size != size:
            product = " x ".join(str(axis.size) for axis in topology.axes)
            raise ValueError(
                f"topology {text!r} describes {product} = {topology.size} ranks, but the Ulysses degree is {size}"
            )
        return topology

    @property
    def moving_axes(self) -> tuple[str, ...]:
        """Names of the axes with more than one rank, along which messages move."""
        return tuple(axis.name for axis in self.axes if axis.size > 1)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the position of a rank on each axis, outermost first."""
        position = []
        for size in reversed(self.shape):
            rank, coordinate = divmod(rank, size)
            position.append(coordinate)
        return tuple(reversed(position))

    def rank(self, coordinates: Iterable[int]) -> int:
        """Return the rank at a position; the inverse of :meth:`coordinates`."""
        rank = 0
        for coordinate, size in zip(coordinates, self.shape, strict=True):
            rank = rank * size + coordinate
        return rank

    def group_of(self, rank: int, *dims: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` at most on the axes numbered `dims`, in rank order."""
        own = self.coordinates(rank)
        ranges = [range(size) if dim in dims else (own[dim],) for dim, size in enumerate(self.shape)]
        return tuple(self.rank(position) for position in itertools.product(*ranges))

    def contiguous(self, count: int) -> "Topology":
        """Return the topology of each group of `count` consecutive ranks.

        Flat if the groups do not all have the same position on the axes.
        """
        return self._subset(count, 1)

    def strided(self, count: int) -> "Topology":
        """Return the topology of each group of `count` ranks that are equally spaced over the whole topology.

        Flat if the groups do not all have the same position on the axes.
        """
        return self._subset(count, self.size // count)

    def _subset(self, count: int, stride: int) -> "Topology":
        """Return the topology of the ranks 0, `stride`, 2 * `stride` and so on, `count` of them.

        From the innermost axis outwards, each axis is divided first by what is left of the stride, then by what is left
        of the count.
        """
        sizes, remaining = {}, count
        for axis in reversed(self.axes):
            skipped = math.gcd(axis.size, stride)
            available = axis.size // skipped
            taken = math.gcd(available, remaining)
            stride, remaining = stride // skipped, remaining // taken
            if (available > 1 and stride > 1) or (taken < available and remaining > 1):
                return Topology.flat(count)
            sizes[axis.name] = taken
        named = tuple(Axis(axis.name, sizes[axis.name]) for axis in self.axes if sizes[axis.name] > 1)
        return Topology(named) if named else Topology.flat(count)

    def __str__(self) -> str:
        if self.axes[0].name == FLAT:
            return FLAT
        return ",".join(f"{axis.name}={axis.size}" for axis in self.axes)


def _parse_sizes(text: str) -> dict[str, int]:
    if re.fullmatch(r"\d+(x\d+)*", text):
        sizes = [int(size) for size in text.split("x")]
        if len(sizes) > len(AXIS_NAMES):
            raise ValueError(f"topology {text!r} has {len(sizes)} axes, valid are at most {len(AXIS_NAMES)}")
        pairs = list(zip(AXIS_NAMES, sizes, strict=False))
    else:
        matches = [re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part) for part in text.split(",")]
        pairs = [(match[1], int(match[2])) for match in matches if match]
        if len(pairs) < len(matches):
            raise ValueError(f"topology {text!r} is not valid; valid are {NOTATION}")
    for name, size in pairs:
        if name not in NESTING:
            raise ValueError(f"topology {text!r} has the unknown axis {name!r}; valid are {', '.join(NESTING)}")
        if size < 1:
            raise ValueError(f"topology {text!r} has size {size} on axis {name!r}; valid are sizes from 1")
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"topology {text!r} has the same axis twice")
    return dict(pairs)
