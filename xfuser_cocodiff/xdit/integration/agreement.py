"""Decisions that all ranks must share, settled over the rendezvous store before any collective starts.

A rank that fails alone would leave the others waiting in a collective; here it tells them why, and all fail alike.

Ranks meet in rounds, in which each posts one thing and waits for what the others post. A rank that was told something
proposes its settings in a round, whenever it makes some. A rank that was told nothing makes its own without a word, as
it would without the plugin, and so may do that alone. It is heard in the round that every rank takes part in when xDiT
is about to make its groups, which is where all ranks meet anyway; a rank that proposes waits until then.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from xfuser_cocodiff.engine.settings.options import ENABLE_OPTION

TIMEOUT = timedelta(minutes=10)
"""How long ranks wait for each other: they may load at very different speeds, but not for ever."""
DISABLED_RANK_TIMEOUT = timedelta(seconds=30)
"""How long a rank waits for the others that was told nothing itself: the plugin may be missing where they are, and it
would do without."""
EXIT_TIMEOUT = timedelta(seconds=60)
"""How long a rank that fails waits for the others to have read why."""

_rounds = itertools.count()
_last = [""]
"""Key of the last round."""


def gather_proposals(propose: Callable[[], dict]) -> list[dict]:
    """Collect what every rank proposes. All ranks must call this equally often, but for those that were told nothing.

    Args:
        propose: makes this rank's proposal, a dict of JSON values that is empty where the rank was told nothing; what
            it raises is raised on every rank.

    Returns:
        The proposals, by rank; none where this rank was told nothing, and waited for nobody.

    Raises:
        ValueError: of the lowest rank whose proposal failed, in that rank's words; or some ranks were told nothing.
        RuntimeError: a rank did not answer; names those that did not.
    """
    try:
        mine: dict[str, Any] = {"value": propose()}
    except Exception as error:  # whatever it is, the others must hear of it
        mine = {"error": str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"}
    if not mine.get("value", True):
        return []
    return [answer["value"] for answer in _gather(mine)]


def check_all(is_enabled: bool) -> None:
    """Find out whether all ranks were told alike. Every rank calls this where it is about to make groups.

    Args:
        told: whether this rank makes them for the plugin.

    Raises:
        ValueError: some were told what others were not, or what one was told is not valid; on every rank alike.
        RuntimeError: this rank was told, and another one did not answer; names those that did not.
    """
    if is_enabled:
        _gather({"is_enabled": True})
    else:
        with contextlib.suppress(MissingReportError):
            _gather({"is_enabled": False}, DISABLED_RANK_TIMEOUT)


class OptionError(ValueError):
    """What is wrong with options, on all ranks alike."""


class MissingReportError(RuntimeError):
    """A rank did not answer."""


def raise_on_all_ranks(message: str) -> NoReturn:
    """Raise what all ranks have found in the last round, on each of them, when the others have read it too.

    The store may live in a rank that leaves, and a launcher may end the others when one does.

    Raises:
        OptionError: always.
    """
    if dist.is_initialized():
        # Another rank may be faster, and take the store with it: by then everything was read.
        with contextlib.suppress(RuntimeError):
            store = _get_default_store()
            store.set(f"{_last[0]}/read/{dist.get_rank()}", "")
            store.wait([f"{_last[0]}/read/{rank}" for rank in range(dist.get_world_size())], EXIT_TIMEOUT)
    raise OptionError(message)


def by_rank(values: Sequence[Any]) -> str:
    """Each value with the ranks that have it: ``rank 0: 'flat'; ranks 1, 3: 'hierarchical'``."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}: {value}" for value, found in ranks.items()
    )


def _gather(mine: dict, timeout: timedelta | None = None) -> list[dict]:
    """What the ranks posted in a round in which all of them do the same, and none has failed."""
    answers = _posted(mine, timeout or TIMEOUT) if dist.is_initialized() else [mine]
    failed = [(rank, answer["error"]) for rank, answer in enumerate(answers) if "error" in answer]
    if failed:
        rank, error = failed[0]
        everywhere = len(failed) == len(answers) and len({error for _, error in failed}) == 1
        raise_on_all_ranks(error if everywhere else f"on rank {rank}: {error}")
    is_enabled = [answer.get("is_enabled", True) for answer in answers]
    if len(set(is_enabled)) > 1:
        given = by_rank(["given" if each else "not given" for each in is_enabled])
        raise_on_all_ranks(f"CoCoDiff's options differ between ranks: --{ENABLE_OPTION}: {given}")
    proposing = ["makes settings" if "value" in answer else "makes groups" for answer in answers]
    if len(set(proposing)) > 1:
        raise_on_all_ranks(
            f"create_config() must be called equally often on all ranks with --{ENABLE_OPTION}: {by_rank(proposing)}"
        )
    return answers


def _posted(mine: dict, timeout: timedelta) -> list[dict]:
    store, world = _get_default_store(), dist.get_world_size()
    # The store may outlive a torchrun restart, whose ranks must not read what the previous attempt said.
    key = _last[0] = f"cocodiff/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_rounds)}"
    store.set(f"{key}/{dist.get_rank()}", json.dumps(mine))
    keys = [f"{key}/{rank}" for rank in range(world)]
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        silent = [rank for rank in range(world) if not store.check([keys[rank]])]
        raise MissingReportError(
            f"ranks {silent} did not report CoCoDiff's options within {timeout}; install and enable the plugin on all "
            "nodes"
        ) from None
    return [json.loads(store.get(key)) for key in keys]
