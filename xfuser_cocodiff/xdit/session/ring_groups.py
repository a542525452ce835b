"""Placement of Ulysses groups and rings: xDiT itself has Ulysses among neighboring ranks only."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist

from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.settings.ring_placement import INNER, OUTER

_placement = ContextVar("placement", default=OUTER)
"""Placement of the ring while xDiT makes its groups."""


def patches() -> list[Patch]:
    """Return the patches that place the groups, in a context of :func:`placed`."""
    return [
        # In the package, from which xDiT imports it when it makes its groups.
        Patch(
            "yunchang",
            "set_seq_parallel_pg",
            "the ring among neighbors, Ulysses across",
            _with_placement,
            on_activation=True,
        ),
    ]


@contextlib.contextmanager
def placed(engine_config: Any) -> Iterator[None]:
    """Let xDiT place the groups that it makes meanwhile as an engine's --cocodiff_ring says."""
    token = _placement.set(configured_placement(engine_config.parallel_config) if engine_config else OUTER)
    try:
        yield
    finally:
        _placement.reset(token)


def configured_placement(parallel_config: Any) -> str:
    """Return the placement of the ring that the options ask for, INNER or OUTER; the same on all ranks."""
    config = host.config_of(parallel_config)
    return config.ring if config and parallel_config.pp_degree == 1 else OUTER


def _with_placement(original: Callable) -> Callable:
    @functools.wraps(original)
    def set_seq_parallel_pg(*args: Any, **kwargs: Any) -> None:
        if _placement.get() == INNER:
            kwargs["use_ulysses_low"] = False
        original(*args, **kwargs)

    return set_seq_parallel_pg


def placement(group: dist.ProcessGroup, ring_group: dist.ProcessGroup) -> str:
    """Return the placement of a ring beside its Ulysses group, INNER or OUTER: groups may be older than the options."""
    ulysses, ring = (dist.get_process_group_ranks(each) for each in (group, ring_group))
    return INNER if len(ulysses) > 1 and ulysses[1] - ulysses[0] > ring[1] - ring[0] else OUTER
