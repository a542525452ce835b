"""Finds out which rank is gone when ranks fail to communicate, so that each can say so before it leaves.

Every rank keeps a thread that listens at the rendezvous store. A rank that fails to communicate calls the roll there:
who does not answer is gone or stopped, and whose answer is that it does not communicate has not come to the exchange.
An answer stays, so a rank that left because of another's failure is not taken for its cause.
"""

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

PATIENCE_SECONDS = 10.0
"""How long a rank may take to answer."""
_LISTEN_SECONDS, _POLL_SECONDS = 0.5, 0.05
_CALLED = "cocodiff/roll_call/called"

_stage: str | None = None
"""What this rank communicates in at the moment."""
_attended: Callable[[], dist.Store | None] = type(None)
"""A weak reference to the store that this rank listens at; before there is one, something that gives None as well."""
_leaving = threading.Event()


class LostRankError(RuntimeError):
    """Ranks failed to communicate because one of them is gone or does not answer."""


class naming_the_lost:  # noqa: N801 (reads as what it does; a class costs a third of a generator)
    """Context in which a failure to communicate becomes an error that names the ranks to blame.

    Args:
        group: the ranks that wait for each other in it.
        stage: its name, for the message.
    """

    __slots__ = ("group", "stage")

    def __init__(self, group: dist.ProcessGroup | list[int], stage: str) -> None:
        self.group, self.stage = group, stage

    def __enter__(self) -> None:
        """Note that this rank communicates."""
        global _stage
        _stage = self.stage

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        global _stage
        if isinstance(error, RuntimeError) and not isinstance(error, LostRankError):
            raise _explained(error, self.group, self.stage) from error
        _stage = None


def attend() -> None:
    """Answer from now on when the roll is called; every rank that may be waited for must have done so."""
    global _attended
    store = _get_default_store()
    if _attended() is not store:
        _attended = weakref.ref(store)
        # A connection of its own: the other one is taken while this rank waits for a key.
        own, rank = store.clone(), dist.get_rank()
        own.set(_key("attends", rank), "")
        listener = threading.Thread(target=_listen, args=(own, rank, _attended), name="roll call", daemon=True)
        listener.start()
        # It must not be inside the store when the interpreter ends, or the process would crash then.
        atexit.register(lambda: (_leaving.set(), listener.join(1)))


def _listen(store: dist.Store, rank: int, attended: Callable[[], dist.Store | None]) -> None:
    """Answer once, when the roll is called, unless the world is torn down before."""
    with contextlib.suppress(RuntimeError):  # the store is gone, and with it whoever could ask
        while attended() and not _leaving.wait(_LISTEN_SECONDS):
            if store.check([_CALLED]):
                store.set(_key("answers", rank), _stage or "")
                return


def _explained(error: Exception, group: dist.ProcessGroup | list[int], stage: str) -> LostRankError:
    """The error to raise for what the backend raised."""
    members, here = group if isinstance(group, list) else dist.get_process_group_ranks(group), dist.get_rank()
    findings: list[str] = []

    def call() -> None:
        with contextlib.suppress(RuntimeError):  # there is no store to ask
            findings.append(_call(members, here, stage))

    # In a thread, because a store whose host was stopped never returns.
    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(2 * PATIENCE_SECONDS)
    nobody = "the rendezvous store does not answer either, so the rank that hosts it (usually rank 0) is gone"
    finding = findings[0] if findings else nobody
    return LostRankError(
        f"rank {here}: communication along {stage!r} among ranks {members} failed: {finding} ({error})"
    )


def _call(members: list[int], here: int, stage: str) -> str:
    """Call the roll and say what came of it; raises where there is no store to ask."""
    store = _get_default_store().clone()
    store.set(_key("answers", here), stage)
    store.set(_CALLED, "")
    attending = [rank for rank in range(dist.get_world_size()) if store.check([_key("attends", rank)])]
    missing, deadline = set(members) | set(attending), time.monotonic() + PATIENCE_SECONDS
    while missing and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        missing = {rank for rank in missing if not store.check([_key("answers", rank)])}
    if missing:
        return f"{_ranks(missing)} gone or not answering"
    if absent := {rank for rank in members if not store.get(_key("answers", rank))}:
        return f"{_ranks(absent)} alive but did not come to it"
    return "all of them are alive and came to it, so a link between them failed, or one of them is too slow"


def _key(kind: str, rank: int) -> str:
    return f"cocodiff/roll_call/{kind}/{rank}"


def _ranks(numbers: set[int]) -> str:
    listed = ", ".join(map(str, sorted(numbers)))
    return f"rank {listed} is" if len(numbers) == 1 else f"ranks {listed} are"
