"""Traffic statistics of stock xDiT's collectives, as those of the plugin's, for records and benchmarks of stock."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from xfuser_cocodiff.engine.topology.topology import FLAT
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.session.session import active

_USP = "xfuser.model_executor.layers.usp"


def patches() -> list[Patch]:
    """Return the patches of the all-to-all and the ring."""
    return [
        Patch(_USP, "_sdpa_all_to_all_single", "stock's traffic", watch_all_to_all, ("x",)),
        Patch(_USP, "ring_attn", "stock's traffic in a ring", watch_ring),
    ]


def watch_all_to_all(original: Callable) -> Callable:
    """Return stock's all-to-all, counted and timed."""
    from xfuser.core.distributed import get_ulysses_parallel_world_size

    @functools.wraps(original)
    def _sdpa_all_to_all_single(x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return original(x)
        traffic = active().traffic
        ranks = get_ulysses_parallel_world_size()
        traffic.count_bytes(FLAT, ranks, x.nbytes // ranks)
        with traffic.time_stage(FLAT, x.device):
            return original(x)

    return _sdpa_all_to_all_single


def watch_ring(original: Callable) -> Callable:
    """Return stock's ring attention, counted and not timed: its messages overlap with attention."""
    from xfuser.core.distributed import get_ring_parallel_world_size

    @functools.wraps(original)
    def ring_attn(
        function: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            active().traffic.count_bytes("ring", get_ring_parallel_world_size(), key.nbytes + value.nbytes)
        return original(function, query, key, value, *args, **kwargs)

    return ring_attn


def degrees() -> dict[str, int | None]:
    """Return the Ulysses and the ring degree of the current engine; None where xDiT has no runtime state yet."""
    from xfuser.core.distributed import runtime_state

    parallel = getattr(runtime_state._RUNTIME, "parallel_config", None)
    return {
        "degree": parallel.ulysses_degree if parallel else None,
        "ring_degree": parallel.ring_degree if parallel else None,
    }
