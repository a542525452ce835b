"""Ulysses groups and rings where the settings want them: xDiT's own has Ulysses among neighbouring ranks only."""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist

from xfuser_cocodiff.engine.settings.ring_placement import INNER, OUTER
from xfuser_cocodiff.xdit.patching.patch import Patch

_wanted = ContextVar("wanted", default=OUTER)


def patches() -> list[Patch]:
    """Rows that make the groups."""
    return [
        Patch(
            "xfuser.core.distributed.runtime_state",
            "RuntimeState._check_distributed_env",
            "groups are made as the settings have it",
            _by_settings,
            ("self", "parallel_config"),
        ),
        # Through the package: xDiT imports it from there when it makes its groups.
        Patch("yunchang", "set_seq_parallel_pg", "the ring among neighbours, Ulysses across", _placing),
    ]


def _by_settings(original: Callable) -> Callable:
    @functools.wraps(original)
    def _check_distributed_env(self: Any, parallel_config: Any) -> None:
        token = _wanted.set(wanted(parallel_config))
        try:
            original(self, parallel_config)
        finally:
            _wanted.reset(token)

    return _check_distributed_env


def wanted(parallel_config: Any) -> str:
    """Where the ring is to lie; the same on every rank, as the settings are."""
    config = getattr(parallel_config.sp_config, "cocodiff", None)
    return config.ring if config and parallel_config.pp_degree == 1 else OUTER


def _placing(original: Callable) -> Callable:
    @functools.wraps(original)
    def set_seq_parallel_pg(*args: Any, **kwargs: Any) -> None:
        if _wanted.get() == INNER:
            kwargs["use_ulysses_low"] = False
        original(*args, **kwargs)

    return set_seq_parallel_pg


def found(group: dist.ProcessGroup, around: dist.ProcessGroup) -> str:
    """Return where a ring lies beside a Ulysses group: groups may have been made before there were settings."""
    ulysses, ring = (dist.get_process_group_ranks(each) for each in (group, around))
    return INNER if len(ulysses) > 1 and ulysses[1] - ulysses[0] > ring[1] - ring[0] else OUTER
