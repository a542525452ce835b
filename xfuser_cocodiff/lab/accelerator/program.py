"""A recorded step of one rank: its collectives, when they start, and marks such as the end of a block."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from xfuser_cocodiff.lab.accelerator.time_line import Instant


@dataclass(eq=False)
class RecordedCollective:
    """One collective of a step."""

    group: str
    """Name of its process group. Collectives of one group run one after the other."""
    start: Instant
    """When its stream reaches it."""
    sent: tuple[int, ...]
    """Bytes for each rank of the group."""
    received: tuple[int, ...]
    """Bytes from each rank of the group."""


@dataclass
class Program:
    """Everything that one rank's accelerator does in a step."""

    collectives: list[RecordedCollective] = field(default_factory=list)
    """In the order in which the host starts them."""
    marks: dict[str, Instant] = field(default_factory=dict)
    """Instants by name, such as the begin of each block."""
    end: Instant = field(default_factory=Instant)
    """When host and device are done."""
    kernel_seconds: float = 0.0
    """Total duration of the kernels of all streams."""
    host_seconds: float = 0.0
    """Total time of the host's calls."""
    launches: int = 0
    """Number of kernels."""

    def by_group(self) -> dict[str, list[RecordedCollective]]:
        """Return the collectives of each group, in their order."""
        groups: dict[str, list[RecordedCollective]] = {}
        for collective in self.collectives:
            groups.setdefault(collective.group, []).append(collective)
        return groups

    def sent_bytes(self) -> Iterator[tuple[str, int, int]]:
        """Yield group, index of a rank in it, and the bytes sent to it, for each message."""
        for collective in self.collectives:
            yield from zip(itertools.repeat(collective.group), itertools.count(), collective.sent)
