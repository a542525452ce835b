"""Timing of communication on all ranks of a group: interleaved, to compare variants, or one function at a time."""

import math
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from xfuser_cocodiff.engine.comm import failure_detection
from xfuser_cocodiff.engine.topology import devices

_SMALL_GROUP, _MAX_FACTOR = 8, 4
_SECONDS_PER_RANK = 0.02
"""Shortest duration of a timed sample, per rank. Ranks enter a sample after a barrier and leave it one by one, which
must be negligible beside its duration."""
_MAX_CALLS = 50
_WARMUP_ROUNDS = 2
"""Untimed rounds, which open connections, allocate memory and estimate the duration of a call."""


def calls_per_sample(calls: int, ranks: int) -> int:
    """Return how many calls to time in a row, given the number that is enough for a small group.

    Larger groups need more: their barrier takes longer.
    """
    return calls * min(max(1, ranks // _SMALL_GROUP), _MAX_FACTOR)


def time_calls(
    work: Callable[[], object],
    calls: int,
    rounds: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    is_warm: bool = False,
) -> list[float]:
    """Return the seconds per call of a function, one value per round, as the maximum over ranks.

    All ranks must call this and get the same values. An untimed call comes first, which opens connections and allocates
    memory, and a barrier before each round. This is cheaper than :func:`time_interleaved`, but less suited to comparing
    functions.

    Args:
        work: function that every rank of the group runs; it waits for what it starts.
        calls: number of calls in a row per round.
        rounds: number of timed samples.
        group: the ranks; None for this rank alone, without any collective.
        device: where the function runs.
        is_warm: whether a similar function has just been timed, so that no untimed call is needed.
    """
    times = torch.empty(rounds, dtype=torch.float64)
    if not is_warm:
        work()
    _synchronize(device)
    for number in range(rounds):
        if group:
            _barrier(group, device)
        times[number] = _seconds_per_call(work, calls, device)
    return _gather(times.to(device), group).amax(0).tolist() if group else times.tolist()


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
                _barrier(group, device)
                times[index, number] = _seconds_per_call(works[names[index]], calls, device)
        return _gather(times.to(device), group).amax(0)

    slowest_call = run_rounds(_WARMUP_ROUNDS, 1).amin(1).max().item()
    calls = min(_MAX_CALLS, max(1, math.ceil(_SECONDS_PER_RANK * dist.get_world_size() / slowest_call)))
    return dict(zip(names, run_rounds(repeats, calls).tolist(), strict=True))


def max_over_ranks(value: float, device: torch.device) -> float:
    """Return the maximum of a value over all ranks."""
    return _gather(torch.tensor(value, dtype=torch.float64, device=device), dist.group.WORLD).max().item()


def mean_over_ranks(value: float, device: torch.device) -> float:
    """Return the mean of a value over all ranks."""
    return _gather(torch.tensor(value, dtype=torch.float64, device=device), dist.group.WORLD).mean().item()


def _seconds_per_call(work: Callable[[], object], calls: int, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        work()
    _synchronize(device)
    return (time.perf_counter() - started) / calls


def _barrier(group: dist.ProcessGroup, device: torch.device) -> None:
    _gather(torch.zeros(1, device=device), group)
    _synchronize(device)


def _gather(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the values of all ranks, shape (P, ...).

    An all-to-all, and not an all-gather: in it every rank notices by itself that another one has failed.
    """
    size = group.size()
    if dist.get_backend(group) == dist.Backend.GLOO:
        values = values.cpu()
    with failure_detection.report_failed_ranks(group, "timing"):
        gathered = functional.all_to_all_single(values.flatten().repeat(size), None, None, group)
        if isinstance(gathered, functional.AsyncCollectiveTensor):
            gathered = gathered.wait()
    return gathered.view(size, *values.shape)


def _synchronize(device: torch.device) -> None:
    if devices.capabilities(device.type).is_asynchronous:
        torch.accelerator.synchronize()
