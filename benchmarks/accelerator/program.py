"""A recorded step: what the accelerator of rank 0 does. All ranks run the same code, so it stands for all of them."""

from collections import Counter
from dataclasses import dataclass, field

from benchmarks.accelerator.time_line import Instant


@dataclass(eq=False)
class RecordedCollective:
    """One collective of a step."""

    ranks: tuple[int, ...]
    """Its ranks, from rank 0 on. Collectives of the same ranks run one after the other."""
    start: Instant
    """When its stream reaches it."""
    sent: tuple[int, ...]
    """Bytes for each of its ranks; those for rank 0 itself do not move."""
    is_gather: bool = False
    """Whether all members are sent the same block."""

    @property
    def is_all_to_all(self) -> bool:
        """Whether several members are sent a share of their own: not in a permutation, nor in an all-gather."""
        return not self.is_gather and sum(size > 0 for size in self.sent[1:]) > 1


@dataclass
class Program:
    """Everything that rank 0 does in a step."""

    collectives: list[RecordedCollective] = field(default_factory=list)
    """All collectives, in the order in which the host starts them."""
    kernels: list[float] = field(default_factory=list)
    """Durations of all kernels in seconds."""
    sent: Counter[int] = field(default_factory=Counter)
    """Bytes sent to each rank."""
    marks: dict[str, Instant] = field(default_factory=dict)
    """Named instants of the step, such as the begin and end of each block."""
    sent_at: dict[str, Counter[int]] = field(default_factory=dict)
    """Bytes sent up to each of them."""
    end: Instant = field(default_factory=Instant)
    """When host and device are done."""
