"""A recorded step: what the accelerator of rank 0 does. All ranks run the same code, so it stands for all of them."""

from collections import defaultdict
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
    step: int = 0
    """Number of the step on its device."""

    @property
    def is_all_to_all(self) -> bool:
        """Whether several members are sent a share of their own: not in a permutation, nor in an all-gather."""
        return not self.is_gather and sum(size > 0 for size in self.sent[1:]) > 1


KERNEL_SECONDS, HOST_SECONDS, LAUNCHES = "kernel seconds", "host seconds", "launches"
"""What a step sums up, besides the bytes that are sent to each rank."""
Totals = defaultdict[str | int, float]


@dataclass
class Program:
    """Everything that rank 0 does in a step."""

    collectives: list[RecordedCollective] = field(default_factory=list)
    """All collectives, in the order in which the host starts them."""
    totals: Totals = field(default_factory=lambda: defaultdict(float))
    """Sums over the step: durations of kernels, host time of all calls, number of kernels, and bytes by rank."""
    marks: dict[str, Instant] = field(default_factory=dict)
    """Named instants of the step, such as the begin and end of each block."""
    totals_at: dict[str, Totals] = field(default_factory=dict)
    """Sums up to each of them."""
    end: Instant = field(default_factory=Instant)
    """When host and device are done."""
