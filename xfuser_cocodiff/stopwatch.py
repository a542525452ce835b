"""Times communication on all ranks of a group at once."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from xfuser_cocodiff import roll_call


def seconds_of_a_call(
    work: Callable[[], object], calls: int, rounds: int, group: dist.ProcessGroup, device: torch.device
) -> float:
    """Seconds of one call, the same on every rank: of the slowest rank, in the round in the middle.

    Args:
        work: done by every rank of the group; waits for what it starts.
        calls: in a row, in each round; what one of them waits for the last one's stragglers is part of its time.
        rounds: of which the median counts.
        group: the ranks.
        device: where they work.
    """
    work()  # opens connections and allocates
    times = torch.empty(rounds, dtype=torch.float64)
    for number in range(rounds):
        _synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            work()
        _synchronize(device)
        times[number] = (time.perf_counter() - started) / calls
    slowest = times.to(device)
    with roll_call.naming_the_lost(group, "stopwatch"):
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.median().item()


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
