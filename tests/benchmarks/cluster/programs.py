"""Recorded steps that tests make by hand, with times that are known."""

from benchmarks.accelerator.clock import Clock
from benchmarks.accelerator.program import Program
from xfuser_cocodiff.tools.accelerator.accelerators import Accelerator

INSTANT = Accelerator("instant host", 1e9, 1e9, 1e9, 1e9, 0.0, launch_seconds=0.0, collective_host_seconds=0.0)


def blocks(ranks: int, message_bytes: int, before: float, after: float, count: int = 1) -> Program:
    """Return a step of blocks: computation, one flat all-to-all, computation.

    Args:
        ranks: number of ranks.
        message_bytes: bytes for each rank.
        before: seconds of the computation before the all-to-all.
        after: seconds of the computation after it.
        count: number of blocks.
    """
    clock = Clock(INSTANT)
    clock.begin_step()
    for index in range(count):
        clock.mark(f"block {index} begin")
        clock.launch(before)
        clock.wait_for(clock.start_collective(range(ranks), (message_bytes,) * ranks))
        clock.launch(after)
        clock.mark(f"block {index} end")
    return clock.end_step()
