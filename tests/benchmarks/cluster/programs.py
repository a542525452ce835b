"""Recorded steps that tests make by hand, with times that are known."""

from benchmarks.accelerator.program import Counts, GroupPattern, Program, RecordedCollective
from benchmarks.accelerator.time_line import Instant


def one_block(ranks: int, message_bytes: int, before: float, after: float, kind: str = "block") -> Program:
    """Return a step of one block: computation, one flat all-to-all, computation.

    Args:
        ranks: number of ranks.
        message_bytes: bytes for each rank.
        before: seconds of the computation before the all-to-all.
        after: seconds of the computation after it.
        kind: kind of the block.
    """
    group = GroupPattern.of(range(ranks))
    sizes = (message_bytes,) * ranks
    exchange = RecordedCollective(group, Instant(before), sizes, sizes)
    end = Instant(before).after_collective(exchange).after(after)
    return Program(
        [exchange],
        {f"{kind} 0 begin": Instant(), f"{kind} 0 end": end},
        {f"{kind} 0 begin": Counts(0.0, 0.0, 0, 0), f"{kind} 0 end": Counts(before + after, 0.001, 2, 1)},
        end,
        kernel_seconds=before + after,
        host_seconds=0.001,
        launches=2,
    )
