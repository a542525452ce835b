"""Timing of functions that communicate, on all ranks of a group."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from xfuser_cocodiff.engine.comm import failure_detection
from xfuser_cocodiff.engine.topology import devices


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
    memory, and a barrier before each round.

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
            barrier(group, device)
        times[number] = seconds_per_call(work, calls, device)
    return gather(times.to(device), group).amax(0).tolist() if group else times.tolist()


def seconds_per_call(work: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the seconds per call of a function on this rank, over some calls in a row."""
    started = time.perf_counter()
    for _ in range(calls):
        work()
    _synchronize(device)
    return (time.perf_counter() - started) / calls


def barrier(group: dist.ProcessGroup, device: torch.device) -> None:
    """Wait for all ranks, and for all work on the device."""
    gather(torch.zeros(1, device=device), group)
    _synchronize(device)


def gather(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
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
