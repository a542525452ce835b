"""How fast the links of an emulated cluster are to be for stock's all-to-alls to take a share of its step."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
import torch.distributed as dist

from xfuser_cocodiff.bench.contender import Contender, without_sending
from xfuser_cocodiff.bench.transformer import Step
from xfuser_cocodiff.emulation import links
from xfuser_cocodiff.measuring.contest import contest
from xfuser_cocodiff.reporting.progress import Teller

TRIALS = 3
"""Steps of each side for a first figure."""
_CLOSE, _ATTEMPTS = 0.02, 6
_PACKET_SECONDS = 2e-3
"""Messages are long, and packets of a quarter of a millisecond would take a fifth of the processor from the ranks."""


def find(share: float, step: Step, stock: Contender, told: Teller) -> links.Cluster:
    """Shape the links so that stock's all-to-alls take a share of its step, as near as the machine allows."""
    cluster, seen = links.shape(links.from_environment().scale, _PACKET_SECONDS), []
    dist.barrier()
    for _ in range(_ATTEMPTS):
        works = {"alone": without_sending(step), "stock": lambda: stock.run(step)}
        alone, whole = seconds(works, told.advance).values()
        told.say(f"scale {cluster.scale:.3g}: stock's step takes {whole:.2f} s, {alone:.2f} s of it not in all-to-alls")
        seen.append((cluster.scale, whole, alone))
        share, scale = _towards(share, seen)
        slowest, fastest = min(cluster.rates.values()), max(cluster.rates.values())
        scale = min(max(scale, links.MIN_RATE / slowest), links.MAX_RATE / fastest)
        if abs(1 - alone / whole - share) < _CLOSE or math.isclose(scale, cluster.scale, rel_tol=0.01):
            break
        cluster = links.shape(scale, _PACKET_SECONDS)
        dist.barrier()
    return cluster


def _towards(share: float, seen: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The share of stock's step that its all-to-alls can take, as near as possible to a wanted one, and the scale of
    links that makes it so.

    Computation stays as it is, and what is sent goes with the speed of links: all-to-alls, and what comes together at
    the end of a step, so that they never take all of it.

    Args:
        share: the wanted one.
        seen: scales of links so far, and at each the seconds of a step, and of one without all-to-alls.
    """
    scale, whole, alone = seen[-1]
    # Where links hardly count at all, they become slower by no more than ten times at once.
    moving = scale * max(whole - alone, 0.1 * alone * share / (1 - share))
    gathering = 0.0
    if len(seen) > 1:
        other_scale, _, other_alone = seen[-2]
        gathering = (alone - other_alone) / (1 / scale - 1 / other_scale)
        gathering = min(max(gathering, 0.0), 0.9 * alone * scale)
    share = min(share, moving / (moving + gathering) - _CLOSE)
    return share, (moving / share - moving - gathering) / (alone - gathering / scale)


def seconds(works: Mapping[str, Callable[[], object]], after: Callable[[], object] = lambda: None) -> dict[str, float]:
    """Of each piece of work."""
    return {name: median(times) for name, times in contest(works, TRIALS, torch.device("cpu"), after).items()}
