"""Timing of several functions in turn on all ranks, to compare them."""

import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.autotune.timing import barrier, gather, seconds_per_call

_SECONDS_PER_RANK = 0.02
"""Shortest duration of a timed sample, per rank. Ranks enter a sample after a barrier and leave it one by one, which
must be negligible beside its duration."""
_MAX_CALLS = 50
_WARMUP_ROUNDS = 2
"""Untimed rounds, which open connections, allocate memory and estimate the duration of a call."""


def time_interleaved(
    works: Mapping[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds per call of several functions, one value per repeat, as the maximum over ranks.

    All ranks must call this and get the same values. Each round times every function once, so that all of them see the
    same conditions, and each round starts with another function.

    Args:
        works: functions by name, in the same order on every rank; each waits for what it starts.
        repeats: number of rounds.
        device: where the functions run.
    """
    group, names = dist.group.WORLD, list(works)

    def run_rounds(rounds: int, calls: int) -> torch.Tensor:
        times = torch.empty(len(names), rounds, dtype=torch.float64)
        for number in range(rounds):
            for offset in range(len(names)):
                index = (number + offset) % len(names)
                barrier(group, device)
                times[index, number] = seconds_per_call(works[names[index]], calls, device)
        return gather(times.to(device), group).amax(0)

    slowest_call = run_rounds(_WARMUP_ROUNDS, 1).amin(1).max().item()
    calls = min(_MAX_CALLS, max(1, math.ceil(_SECONDS_PER_RANK * dist.get_world_size() / slowest_call)))
    return dict(zip(names, run_rounds(repeats, calls).tolist(), strict=True))
