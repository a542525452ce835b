"""Times pieces of work that all ranks do together, taking turns, so that all of them meet the same machine."""

import math
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

_TARGET_SECONDS = 0.15
"""A repeat of a short piece of work runs it as often as this takes, less what the clock and the barrier add."""
_MAX_CALLS = 50


def contest(works: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of one call of each piece of work, per repeat, on the slowest rank; the same on every rank.

    Args:
        works: by name; every rank must pass the same ones, in the same order.
        repeats: how often each is timed. In every round another one begins.
        device: where they work.
    """
    names = list(works)
    first = {name: _seconds(works[name], 1, device) for name in names}  # opens connections, allocates
    warm = {name: min(first[name], _seconds(works[name], 1, device)) for name in names}
    calls = min(_MAX_CALLS, max(1, math.ceil(_TARGET_SECONDS / max(warm.values()))))
    found: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name in (*names[repeat % len(names) :], *names[: repeat % len(names)]):
            found[name].append(_seconds(works[name], calls, device))
    return found


def _seconds(work: Callable[[], object], calls: int, device: torch.device) -> float:
    dist.barrier()
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        work()
    _synchronize(device)
    return slowest((time.perf_counter() - started) / calls, device)


def slowest(seconds: float, device: torch.device) -> float:
    """The largest of the values that the ranks pass."""
    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def mean(value: float, device: torch.device) -> float:
    """The mean of the values that the ranks pass."""
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
