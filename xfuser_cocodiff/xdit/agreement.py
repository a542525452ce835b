"""Decisions that all ranks must share, settled over the rendezvous store before any collective starts.

A rank that fails alone would leave the others waiting in a collective; here it tells them why, and all fail alike.
"""

import itertools
import json
import os
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

PATIENCE = timedelta(minutes=10)
"""How long ranks wait for each other: they may load at very different speeds, but not for ever."""

_rounds = itertools.count()


def agree(propose: Callable[[], dict]) -> list[dict]:
    """Collect what every rank proposes. All ranks must call this equally often.

    Args:
        propose: makes this rank's proposal, a dict of JSON values; what it raises is raised on every rank.

    Returns:
        The proposals, by rank.

    Raises:
        ValueError: of the lowest rank whose proposal failed, in that rank's words.
        RuntimeError: a rank did not answer; names those that did not.
    """
    try:
        mine = {"value": propose()}
    except Exception as error:  # whatever it is, the others must hear of it
        mine = {"error": str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"}
    answers = [mine] if not dist.is_initialized() else _gather(mine)
    failed = [(rank, answer["error"]) for rank, answer in enumerate(answers) if "error" in answer]
    if failed:
        rank, error = failed[0]
        everywhere = len(failed) == len(answers)
        raise ValueError(error if everywhere else f"on rank {rank}: {error}")
    return [answer["value"] for answer in answers]


def _gather(mine: dict) -> list[dict]:
    store, world = _get_default_store(), dist.get_world_size()
    # The store may outlive a torchrun restart, whose ranks must not read what the previous attempt said.
    key = f"cocodiff/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_rounds)}"
    store.set(f"{key}/{dist.get_rank()}", json.dumps(mine))
    keys = [f"{key}/{rank}" for rank in range(world)]
    try:
        store.wait(keys, PATIENCE)
    except RuntimeError:
        silent = [rank for rank in range(world) if not store.check([keys[rank]])]
        raise RuntimeError(
            f"ranks {silent} have not said what CoCoDiff's options are within {PATIENCE}; is the plugin installed "
            "and enabled on all nodes?"
        ) from None
    return [json.loads(store.get(key)) for key in keys]
