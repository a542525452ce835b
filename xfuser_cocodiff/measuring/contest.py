"""Times pieces of work that all ranks do together, and what they say of each other."""

import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from xfuser_cocodiff.measuring.stopwatch import race

_SECONDS_OF_A_RANK = 0.02
"""A repeat of a short piece of work runs it as often as takes this for each rank: they come together before it, and
come out of that one by one, which is to be little beside it."""
_MAX_CALLS = 50
_WARMING_TURNS = 2
"""Which open connections and allocate, and tell how long a call takes."""


def contest(works: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of one call of each piece of work, per repeat, on the slowest rank; the same on every rank.

    Args:
        works: by name; every rank must pass the same ones, in the same order.
        repeats: how often each is timed, in turns.
        device: where they work.
    """
    group, calls = dist.group.WORLD, list(works.values())
    first, second = zip(*race(calls, 1, _WARMING_TURNS, group, device), strict=True)
    slowest_call = max(min(pair) for pair in zip(first, second, strict=True))
    in_a_row = min(_MAX_CALLS, max(1, math.ceil(_SECONDS_OF_A_RANK * dist.get_world_size() / slowest_call)))
    return dict(zip(works, race(calls, in_a_row, repeats, group, device), strict=True))


def slowest(seconds: float, device: torch.device) -> float:
    """The largest of the values that the ranks pass."""
    return _reduced(seconds, "max", device)


def mean(value: float, device: torch.device) -> float:
    """The mean of the values that the ranks pass."""
    return _reduced(value, "sum", device) / dist.get_world_size()


def _reduced(value: float, operation: str, device: torch.device) -> float:
    own = torch.tensor(value, dtype=torch.float64, device=device)
    return functional.wait_tensor(functional.all_reduce(own, operation, dist.group.WORLD)).item()
