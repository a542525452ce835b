"""A recorded step: what the accelerator of a rank does, and what every rank of the machine does likewise.

A step is recorded on rank 0. All ranks run the same code, so the group of a collective is stored as a pattern that
gives the members for every rank, and its messages by distance: how many places after the own rank a member stands.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.accelerator.time_line import Instant


@dataclass(frozen=True)
class GroupPattern:
    """Groups of ranks that repeat over a machine: all combinations of some positions, at some strides."""

    dims: tuple[tuple[int, int], ...]
    """Stride and size of each dim, innermost first."""

    @classmethod
    def of(cls, ranks: Sequence[int]) -> "GroupPattern":
        """Return the pattern of the group that contains rank 0.

        Raises:
            ValueError: the ranks are no combinations of positions at some strides.
        """
        ranks, dims = sorted(ranks), list[tuple[int, int]]()
        count = 1
        while count < len(ranks):
            stride = ranks[count]
            size = 2
            while size * count < len(ranks) and ranks[size * count] == size * stride:
                size += 1
            dims.append((stride, size))
            count *= size
        pattern = cls(tuple(dims))
        if list(pattern.members(0)) != ranks:
            raise ValueError(f"the group {ranks} does not repeat over the ranks")
        return pattern

    @property
    def size(self) -> int:
        """Number of members."""
        return math.prod(size for _, size in self.dims)

    def members(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group that contains a rank, ascending."""
        own = rank - sum(rank // stride % size * stride for stride, size in self.dims)
        members = [own]
        for stride, size in self.dims:
            members = [member + step * stride for step in range(size) for member in members]
        return tuple(sorted(members))


@dataclass(eq=False)
class RecordedCollective:
    """One collective of a step."""

    group: GroupPattern
    """Its ranks. Collectives of one group run one after the other."""
    start: Instant
    """When its stream reaches it."""
    sent: tuple[int, ...]
    """Bytes for the member at each distance, in the order of the group; those at distance 0 do not move."""
    received: tuple[int, ...]
    """Bytes from the member at each distance."""
    is_gather: bool = False
    """Whether all members are sent the same block."""
    step: int = 0
    """Number of the step on its device."""
    tensors: str = ""
    """A letter for each tensor that it sends, as "qkv"; empty if nothing has named them."""

    @property
    def is_all_to_all(self) -> bool:
        """Whether several members are sent a share of their own: not in a permutation, nor in an all-gather."""
        return not self.is_gather and sum(size > 0 for size in self.sent[1:]) > 1


class Counts(NamedTuple):
    """What a step has done up to a mark."""

    kernel_seconds: float
    host_seconds: float
    launches: int
    collectives: int


@dataclass
class Program:
    """Everything that a rank's accelerator does in a step."""

    collectives: list[RecordedCollective] = field(default_factory=list)
    """In the order in which the host starts them."""
    marks: dict[str, Instant] = field(default_factory=dict)
    """Instants by name, such as the begin of each block."""
    counts: dict[str, Counts] = field(default_factory=dict)
    """What the step has done up to each mark."""
    end: Instant = field(default_factory=Instant)
    """When host and device are done."""
    kernel_seconds: float = 0.0
    """Total duration of the kernels of all streams."""
    host_seconds: float = 0.0
    """Total time of the host's calls."""
    launches: int = 0
    """Number of kernels."""

    def by_group(self) -> dict[GroupPattern, list[RecordedCollective]]:
        """Return the collectives of each group, in their order."""
        groups: dict[GroupPattern, list[RecordedCollective]] = {}
        for collective in self.collectives:
            groups.setdefault(collective.group, []).append(collective)
        return groups

    def counts_so_far(self) -> Counts:
        """Return everything that the step has done."""
        return Counts(self.kernel_seconds, self.host_seconds, self.launches, len(self.collectives))

    def sent_bytes(self, rank: int, collectives: slice = slice(None)) -> dict[int, int]:
        """Return the bytes that a rank sends to each other rank in all collectives, or in some of them."""
        sent: dict[int, int] = {}
        for collective in self.collectives[collectives]:
            members = collective.group.members(rank)
            own = members.index(rank)
            for distance, size in enumerate(collective.sent):
                if distance and size:
                    peer = members[(own + distance) % len(members)]
                    sent[peer] = sent.get(peer, 0) + size
        return sent
