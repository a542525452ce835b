"""Times communication on all ranks of a group at once."""

import math
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from xfuser_cocodiff.engine.comm import failure_detection
from xfuser_cocodiff.engine.topology import devices as devices

_FEW_RANKS, _MOST_TIMES = 8, 4
_SECONDS_OF_A_RANK = 0.02
"""A repeat of a short piece of work runs it as often as takes this for each rank: they come together before it, and
come out of that one by one, which is to be little beside it."""
_MAX_CALLS = 50
_WARMING_TURNS = 2
"""Which open connections and allocate, and tell how long a call takes."""


def in_a_row(calls: int, ranks: int) -> int:
    """How many calls to time in a row where so many would do for a few ranks: the more there are, the longer they take
    to come together before the first one."""
    return calls * min(max(1, ranks // _FEW_RANKS), _MOST_TIMES)


def pace(
    work: Callable[[], object],
    calls: int,
    rounds: int,
    group: dist.ProcessGroup,
    device: torch.device,
    is_warm: bool = False,
) -> list[float]:
    """Seconds of one call of a piece of work, per round, on the slowest rank; the same on every rank.

    One call before the rounds is not timed: it opens connections, allocates, and brings those ranks together that the
    work is shared by. That costs less than :func:`contest`, whose works are told apart more surely.

    Args:
        work: what every rank of the group does; it waits for what it starts.
        calls: in a row.
        rounds: how often they are timed.
        group: the ranks.
        device: where they work.
        is_warm: whether something like it has been timed just before, so that no call need go untimed.
    """
    times = torch.empty(rounds, dtype=torch.float64)
    if not is_warm:
        work()
    _synchronize(device)
    for turn in range(rounds):
        times[turn] = _seconds(work, calls, device)
    return _of_all(times.to(device), group).amax(0).tolist()


def contest(works: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of one call of each piece of work, per repeat, on the slowest rank; the same on every rank.

    They take turns, so that all of them meet the same machine, and in every round another one begins.

    Args:
        works: by name, what every rank does, in the same order; each waits for what it starts.
        repeats: how often each is timed.
        device: where they work.
    """
    group, names = dist.group.WORLD, list(works)

    def rounds(count: int, calls: int) -> torch.Tensor:
        times = torch.empty(len(names), count, dtype=torch.float64)
        for turn in range(count):
            for place in range(len(names)):
                number = (turn + place) % len(names)
                _come_together(group, device)
                times[number, turn] = _seconds(works[names[number]], calls, device)
        return _of_all(times.to(device), group).amax(0)

    slowest_call = rounds(_WARMING_TURNS, 1).amin(1).max().item()
    calls = min(_MAX_CALLS, max(1, math.ceil(_SECONDS_OF_A_RANK * dist.get_world_size() / slowest_call)))
    return dict(zip(names, rounds(repeats, calls).tolist(), strict=True))


def slowest(seconds: float, device: torch.device) -> float:
    """The largest of the values that the ranks pass."""
    return _of_all(torch.tensor(seconds, dtype=torch.float64, device=device), dist.group.WORLD).max().item()


def mean(value: float, device: torch.device) -> float:
    """The mean of the values that the ranks pass."""
    return _of_all(torch.tensor(value, dtype=torch.float64, device=device), dist.group.WORLD).mean().item()


def _seconds(work: Callable[[], object], calls: int, device: torch.device) -> float:
    """Of one call among so many in a row."""
    started = time.perf_counter()
    for _ in range(calls):
        work()
    _synchronize(device)
    return (time.perf_counter() - started) / calls


def _come_together(group: dist.ProcessGroup, device: torch.device) -> None:
    _of_all(torch.zeros(1, device=device), group)
    _synchronize(device)


def _of_all(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What every rank holds, shape (P, ...), by an all-to-all: there every rank notices itself if one is gone."""
    size = group.size()
    if dist.get_backend(group) == dist.Backend.GLOO:
        values = values.cpu()
    with failure_detection.report_failed_ranks(group, "stopwatch"):
        found = functional.all_to_all_single(values.flatten().repeat(size), None, None, group)
        if isinstance(found, functional.AsyncCollectiveTensor):
            found = found.wait()
    return found.view(size, *values.shape)


def _synchronize(device: torch.device) -> None:
    if devices.capabilities(device.type).is_asynchronous:
        torch.accelerator.synchronize()
