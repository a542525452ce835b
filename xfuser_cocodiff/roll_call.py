"""Finds out which rank is gone when a collective fails, so that every rank can say so before it leaves.

A rank that sees a collective fail calls the roll over the rendezvous store: it answers itself, and waits a moment for
the others of the group, which must fail as well. Who does not answer is gone or hangs. A rank whose peers all answered
was only left alone by one that had failed elsewhere, and repeats what that one found.
"""

import contextlib
import json
import threading
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

PATIENCE_SECONDS = 10.0
"""How long ranks of one group may take to notice the same failure."""
_POLL_SECONDS = 0.05


class LostRankError(RuntimeError):
    """A collective failed because a rank is gone or does not answer."""


class naming_the_lost:  # noqa: N801 (reads as what it does; a class costs a third of a generator)
    """Context in which a collective's failure becomes an error that names the ranks to blame.

    Args:
        group: the ranks of the collective.
        stage: its name, for the message.
    """

    __slots__ = ("group", "stage")

    def __init__(self, group: dist.ProcessGroup, stage: str) -> None:
        self.group, self.stage = group, stage

    def __enter__(self) -> None:
        """Nothing to do before."""

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError):
            raise explain(error, self.group, self.stage) from error


def explain(error: Exception, group: dist.ProcessGroup, stage: str) -> LostRankError:
    """The error to raise for a collective that failed, which names the ranks that are to blame.

    Args:
        error: what the backend raised.
        group: the ranks of the collective.
        stage: its name, for the message.
    """
    members, here = dist.get_process_group_ranks(group), dist.get_rank()
    answers: list[list[int]] = []

    def call() -> None:
        with contextlib.suppress(RuntimeError):  # there is no store to ask
            answers.append(_missing(members, here))

    # In a thread, because a store whose host was stopped never returns.
    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(3 * PATIENCE_SECONDS)
    where = f"rank {here}: communication along {stage!r} among ranks {members} failed"
    if not answers:
        lost = "the rendezvous store does not answer either, so the rank that hosts it (usually rank 0) is gone"
    elif answers[0]:
        lost = f"{_ranks(answers[0])} gone or not answering"
    else:
        lost = "all of them answer, so a link between them failed"
    return LostRankError(f"{where}: {lost} ({error})")


def _missing(members: list[int], here: int) -> list[int]:
    """Ranks that are to blame, as far as the members of a group know; raises where there is no store to ask."""
    store = _get_default_store()
    store.set(_key("failed", here), "1")
    deadline = time.monotonic() + PATIENCE_SECONDS
    missing = blamed = []
    # Who waits for the findings of others must wait longer than they wait for answers.
    while not blamed and time.monotonic() < deadline + (0 if missing else PATIENCE_SECONDS):
        time.sleep(_POLL_SECONDS)
        missing = [rank for rank in members if not store.check([_key("failed", rank)])]
        found = [json.loads(store.get(key)) for rank in members if store.check([key := _key("blames", rank)])]
        blamed = sorted(set().union(*found))
    store.set(_key("blames", here), json.dumps(blamed or missing))
    return blamed or missing


def _key(kind: str, rank: int) -> str:
    return f"cocodiff/roll_call/{kind}/{rank}"


def _ranks(numbers: list[int]) -> str:
    listed = ", ".join(map(str, numbers))
    return f"rank {listed} is" if len(numbers) == 1 else f"ranks {listed} are"
