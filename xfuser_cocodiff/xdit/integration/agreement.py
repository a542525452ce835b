"""Agreement of all ranks on the options, over the rendezvous store and before the first collective.

A rank that failed alone would leave the others waiting in a collective. Here each rank learns of the error, and all
raise the same one.

Ranks communicate in rounds: each posts one report and waits for those of the others. A rank with the plugin enabled
proposes its config in a round whenever it makes one. A rank with the plugin disabled makes its config without a round,
as stock xDiT does, and may do so alone. It takes part in the round before xDiT makes its process groups, in which all
ranks take part; a rank that proposes waits until then.
"""

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from xfuser_cocodiff.xdit.settings.options import ENABLE_OPTION

TIMEOUT = timedelta(minutes=10)
"""Longest wait for the reports of other ranks, which may take much longer to load."""
DISABLED_RANK_TIMEOUT = timedelta(seconds=30)
"""Longest wait of a rank with the plugin disabled: other ranks may lack the plugin, and never report."""
EXIT_TIMEOUT = timedelta(seconds=60)
"""Longest wait of a rank that fails until all ranks have read the error."""


def gather_proposals(propose: Callable[[], dict]) -> list[dict]:
    """Gather the proposals of all ranks. Ranks with the plugin enabled must call this equally often.

    Args:
        propose: returns this rank's proposal, a dict of JSON values, empty if the plugin is disabled on this rank. An
            exception from it is raised on every rank.

    Returns:
        The proposals by rank; an empty list if the plugin is disabled on this rank, which then waits for none.

    Raises:
        ValueError: a proposal failed, with the message of the lowest such rank; or some ranks have the plugin disabled.
        RuntimeError: a rank did not report within TIMEOUT; names these ranks.
    """
    proposal, failure = None, None
    try:
        proposal = propose()
    except Exception as error:  # of any type: the other ranks must learn of it
        failure = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    if proposal == {}:
        return []
    reports = _gather({"is_enabled": True, "makes": "a config", "proposal": proposal, "error": failure}, TIMEOUT)
    return [report["proposal"] for report in reports]


def check_all(is_enabled: bool) -> None:
    """Check that the plugin is enabled on all ranks or on none. Every rank calls this before it makes process groups.

    Args:
        is_enabled: whether the plugin is enabled on this rank.

    Raises:
        ValueError: the plugin is enabled on some ranks only, or the options of a rank are not valid; on every rank.
        RuntimeError: the plugin is enabled here and another rank did not report; names these ranks.
    """
    report = {"is_enabled": is_enabled, "makes": "process groups", "error": None}
    with contextlib.nullcontext() if is_enabled else contextlib.suppress(RuntimeError):  # the others may not report
        _gather(report, TIMEOUT if is_enabled else DISABLED_RANK_TIMEOUT)


def raise_on_all_ranks(message: str) -> NoReturn:
    """Raise the error that all ranks found in the last round, once all have read it.

    The store may live in a rank that exits, and a launcher may end all ranks when one exits.

    Raises:
        ValueError: always.
    """
    if dist.is_initialized():
        # A faster rank may exit and take the store with it: by then everything has been read.
        with contextlib.suppress(RuntimeError):
            store = _get_default_store()
            key = _round_key(_count_rounds(store, 0))
            store.set(f"{key}/read/{dist.get_rank()}", "")
            store.wait([f"{key}/read/{rank}" for rank in range(dist.get_world_size())], EXIT_TIMEOUT)
    raise ValueError(message)


def by_rank(values: Sequence[Any]) -> str:
    """Format each value with the ranks that have it: ``rank 0: 'flat'; ranks 1, 3: 'hierarchical'``."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(having) > 1 else ''} {', '.join(map(str, having))}: {value}"
        for value, having in ranks.items()
    )


def _gather(report: dict, timeout: timedelta) -> list[dict]:
    """Return the reports of a round.

    Raises:
        ValueError: a rank reported an error, or the ranks reported different things.
        RuntimeError: a rank did not report.
    """
    reports = _gather_reports(report, timeout) if dist.is_initialized() else [report]
    errors = [each["error"] for each in reports]
    if failed := [rank for rank, error in enumerate(errors) if error is not None]:
        is_everywhere = len(failed) == len(reports) and len({*errors}) == 1
        raise_on_all_ranks(errors[0] if is_everywhere else f"on rank {failed[0]}: {errors[failed[0]]}")
    given = ["given" if each["is_enabled"] else "not given" for each in reports]
    if len({*given}) > 1:
        raise_on_all_ranks(f"CoCoDiff's options differ between ranks: --{ENABLE_OPTION}: {by_rank(given)}")
    made = [f"makes {each['makes']}" for each in reports]
    if len({*made}) > 1:
        raise_on_all_ranks(
            f"create_config() must be called equally often on all ranks with --{ENABLE_OPTION}: {by_rank(made)}"
        )
    return reports


def _gather_reports(report: dict, timeout: timedelta) -> list[dict]:
    store, world = _get_default_store(), dist.get_world_size()
    key = _round_key(_count_rounds(store, 1))
    store.set(f"{key}/{dist.get_rank()}", json.dumps(report))
    keys = [f"{key}/{rank}" for rank in range(world)]
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        missing = [rank for rank in range(world) if not store.check([keys[rank]])]
        raise RuntimeError(
            f"ranks {missing} did not report CoCoDiff's options within {timeout}; install and enable the plugin on all "
            "nodes"
        ) from None
    return [json.loads(store.get(key)) for key in keys]


def _count_rounds(store: dist.Store, more: int) -> int:
    """Add to this rank's number of rounds, and return it. The store counts, since a process may outlive it."""
    return store.add(_round_key(f"rounds/{dist.get_rank()}"), more)


def _round_key(name: int | str) -> str:
    # The store may outlive a torchrun restart, whose ranks must not read reports of the previous attempt.
    return f"cocodiff/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{name}"
