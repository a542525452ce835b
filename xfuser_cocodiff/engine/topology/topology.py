"""A topology is a shape with names: how the ranks of a group nest into nodes, GPUs and tiles.

Ranks are numbered with the innermost axis fastest, as launchers and xDiT number them: in ``node=2,gpu=3,tile=2`` the
ranks 0 and 1 are the tiles of one GPU, and ranks 0 and 6 sit at the same place of two nodes. Everything here is
arithmetic; nothing communicates.
"""

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

AXIS_NAMES = ("node", "gpu", "tile")
"""The axes that a topology may name, outermost first."""

FLAT = "flat"
"""The name of the single axis of a topology without levels."""

NOTATION = f"{FLAT!r}, sizes such as '2x3x2' (outermost first), or names such as 'node=2,gpu=3,tile=2'"


@dataclass(frozen=True)
class Axis:
    """One level of a topology."""

    name: str
    size: int


@dataclass(frozen=True)
class Topology:
    """Axes, outermost first. A topology without levels has the one axis ``flat``."""

    axes: tuple[Axis, ...]
    shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Axis sizes, outermost first."""
    size: int = field(init=False, repr=False, compare=False)
    """Number of ranks."""

    def __post_init__(self) -> None:
        # Once for all: they are read at every exchange.
        object.__setattr__(self, "shape", tuple(axis.size for axis in self.axes))
        object.__setattr__(self, "size", math.prod(self.shape))

    @classmethod
    def flat(cls, size: int) -> "Topology":
        """The topology in which all `size` ranks are alike."""
        return cls((Axis(FLAT, size),))

    @classmethod
    def named(cls, **sizes: int) -> "Topology":
        """A topology from axis sizes, brought into nesting order: ``Topology.named(tile=2, node=4)``."""
        return cls(tuple(Axis(name, sizes[name]) for name in AXIS_NAMES if name in sizes))

    @classmethod
    def parse(cls, text: str, size: int | None = None) -> "Topology":
        """Read a topology for a group of `size` ranks, or of as many as it says.

        Args:
            text: 'flat', '2x3x2' or 'node=2,gpu=3,tile=2'.
            size: number of ranks that the sizes must multiply to; any when not given.

        Raises:
            ValueError: not the notation, an unknown or repeated axis, or sizes that do not multiply to `size`.
        """
        text = text.strip()
        if text == FLAT and size:
            return cls.flat(size)
        topology = cls.named(**_sizes(text))
        if size and topology.size != size:
            product = " x ".join(str(axis.size) for axis in topology.axes)
            raise ValueError(
                f"topology {text!r} describes {product} = {topology.size} ranks, but the Ulysses degree is {size}"
            )
        return topology

    @property
    def levels(self) -> int:
        """Number of axes along which anything moves."""
        return sum(axis.size > 1 for axis in self.axes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position of a rank on each axis, outermost first."""
        position = []
        for size in reversed(self.shape):
            rank, coordinate = divmod(rank, size)
            position.append(coordinate)
        return tuple(reversed(position))

    def rank(self, coordinates: Iterable[int]) -> int:
        """Rank at a position; the inverse of :meth:`coordinates`."""
        rank = 0
        for coordinate, size in zip(coordinates, self.shape, strict=True):
            rank = rank * size + coordinate
        return rank

    def group_of(self, rank: int, *dims: int) -> tuple[int, ...]:
        """Ranks that share all coordinates with `rank` but those on the axes numbered `dims`, in the order of ranks."""
        here = self.coordinates(rank)
        ranges = [range(size) if dim in dims else (here[dim],) for dim, size in enumerate(self.shape)]
        return tuple(self.rank(place) for place in itertools.product(*ranges))

    def contiguous(self, count: int) -> "Topology":
        """The topology of each `count` neighbouring ranks; flat where they do not all lie on the axes alike."""
        return self._part(count, 1)

    def strided(self, count: int) -> "Topology":
        """The topology of each `count` ranks that lie equally far apart, over all of the machine; flat as above."""
        return self._part(count, self.size // count)

    def _part(self, count: int, stride: int) -> "Topology":
        """Of the ranks 0, `stride`, 2 * `stride` and so on, `count` of them: innermost, an axis loses what the stride
        skips of it, and gives what is left to the count."""
        sizes, wanted = {}, count
        for axis in reversed(self.axes):
            skipped = math.gcd(axis.size, stride)
            left = axis.size // skipped
            taken = math.gcd(left, wanted)
            stride, wanted = stride // skipped, wanted // taken
            if (left > 1 and stride > 1) or (taken < left and wanted > 1):
                return Topology.flat(count)
            sizes[axis.name] = taken
        named = tuple(Axis(axis.name, sizes[axis.name]) for axis in self.axes if sizes[axis.name] > 1)
        return Topology(named) if named else Topology.flat(count)

    def __str__(self) -> str:
        if self.axes[0].name == FLAT:
            return FLAT
        return ",".join(f"{axis.name}={axis.size}" for axis in self.axes)


def _sizes(text: str) -> dict[str, int]:
    if re.fullmatch(r"\d+(x\d+)*", text):
        sizes = [int(size) for size in text.split("x")]
        if len(sizes) > len(AXIS_NAMES):
            raise ValueError(f"topology {text!r} has {len(sizes)} axes, at most {len(AXIS_NAMES)} are known")
        pairs = list(zip(AXIS_NAMES, sizes, strict=False))
    else:
        matches = [re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part) for part in text.split(",")]
        pairs = [(match[1], int(match[2])) for match in matches if match]
        if len(pairs) < len(matches):
            raise ValueError(f"topology {text!r} is not understood; valid are {NOTATION}")
    for name, size in pairs:
        if name not in AXIS_NAMES:
            raise ValueError(f"topology {text!r} names the unknown axis {name!r}; known are {', '.join(AXIS_NAMES)}")
        if size < 1:
            raise ValueError(f"topology {text!r} gives axis {name!r} the size {size}; sizes start at 1")
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"topology {text!r} names an axis twice")
    return dict(pairs)
