"""Times communication on all ranks of a group at once."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from xfuser_cocodiff import roll_call


def race(
    works: Sequence[Callable[[], object]], calls: int, rounds: int, group: dist.ProcessGroup, device: torch.device
) -> list[list[float]]:
    """Seconds of one call of each piece of work, per round, on the slowest rank; the same on every rank.

    They take turns, so that all of them meet the same machine, and in every round another one begins.

    Args:
        works: what every rank of the group does, in the same order; each waits for what it starts.
        calls: in a row; what one of them waits for stragglers of the one before is part of its time.
        rounds: how often all of them have their turn.
        group: the ranks.
        device: where they work.
    """
    times = torch.empty(len(works), rounds, dtype=torch.float64)
    order = list(range(len(works)))
    for turn in range(rounds):
        first = turn % len(works)
        for number in order[first:] + order[:first]:
            _come_together(group, device)
            started = time.perf_counter()
            for _ in range(calls):
                works[number]()
            _synchronize(device)
            times[number, turn] = (time.perf_counter() - started) / calls
    slowest = times.to(device)
    with roll_call.naming_the_lost(group, "stopwatch"):
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.tolist()


def _come_together(group: dist.ProcessGroup, device: torch.device) -> None:
    with roll_call.naming_the_lost(group, "stopwatch"):
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    _synchronize(device)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
