"""Failure detection: names the unresponsive ranks when a collective fails or is overdue.

Every rank runs a heartbeat thread at the rendezvous store. A rank whose collective fails, or whose deadline is missed,
starts a check there: ranks that do not respond are lost or stopped, and ranks that respond without being in a
collective did not call it. Checks are numbered, and each needs a new response. A rank that fails itself leaves a
report, so that a rank that exits because of another rank's failure is not taken for the cause. A rank that ends
normally says so: groups without it do not miss it.
"""

import atexit
import contextlib
import logging
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from xfuser_cocodiff.engine.comm import deadline

RESPONSE_SECONDS = deadline.CHECK_SECONDS / 2
"""Time that a rank has to respond to a check."""
REPORT_SECONDS = 60.0
"""Time after which a rank withdraws the report of a failure that it has survived."""
_HEARTBEAT_SECONDS, _POLL_SECONDS = 0.5, 0.05
_CHECKS = "cocodiff/failure_detection/checks"
_RESPONSE, _REPORT = "response", "report"
"""Kinds of store keys of a rank: its latest response to a check, and the operation in which it failed."""
_COMMUNICATES = "communicates"
"""End of the response of a rank that is in a collective."""
_ENDED = "0 ended"
"""Last response of a rank that has ended normally; it responds to no check."""

_logger = logging.getLogger("xfuser_cocodiff")
_BACKEND_ERRORS = re.compile(r"gloo|ccl|timed? ?out|connection|socket|broken pipe|peer", re.IGNORECASE)
"""Messages of backend errors that have no exception type of their own."""
_OUT_OF_MEMORY = re.compile(r"out of memory|n.t allocate|cannot allocate|not enough memory|bad_alloc", re.IGNORECASE)

_active: set["report_failed_ranks"] = set()
"""Collectives in which threads of this rank are."""
_reported_at: float | None = None
"""Time of this rank's last report; None after it was withdrawn."""
_store_ref: Callable[[], dist.Store | None] = type(None)
"""Weak reference to the store of the heartbeat; before it starts, a callable that also returns None."""
_stopping = threading.Event()


class UnresponsiveRankError(RuntimeError):
    """A collective failed because a rank is lost or unresponsive, or did not call it."""


class report_failed_ranks:  # noqa: N801 (used as a function; a class costs a third of a generator)
    """Context manager that turns a backend error into an error that names the ranks at fault.

    Args:
        group: the ranks that take part in the collective.
        stage: name of the collective, for the message.
    """

    __slots__ = ("group", "stage")

    def __init__(self, group: dist.ProcessGroup | list[int], stage: str) -> None:
        self.group, self.stage = group, stage

    def __enter__(self) -> None:
        """Record that this rank is in the collective."""
        _active.add(self)

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        try:
            if error is not None and is_backend_error(error):
                what = f"communication along {self.stage!r}"
                raise UnresponsiveRankError(_describe_failure(self.group, what, f"failed ({error})")) from None
        finally:
            _active.discard(self)


def is_backend_error(error: BaseException) -> bool:
    """Return whether an error comes from a backend of torch.distributed that could not complete a collective.

    Errors of tensors and of memory, also of memory inside the backend, are not among them.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    if _OUT_OF_MEMORY.search(str(error)):
        return False
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and bool(_BACKEND_ERRORS.search(str(error)))
    )


def is_heartbeat_running() -> bool:
    """Return whether this rank responds to checks."""
    return _store_ref() is not None


def start_heartbeat() -> None:
    """Start to respond to checks; every rank of the world must call this before its first collective."""
    global _reported_at, _store_ref
    store = _get_default_store()
    if _store_ref() is store:
        return
    _store_ref, _reported_at = weakref.ref(store), None
    deadline.forget_all()  # those of an earlier world
    # A connection of its own: the default one is blocked while this rank waits for a key.
    own, rank = store.clone(), dist.get_rank()
    own.set(_key(_RESPONSE, rank), "0 ")
    heartbeat = threading.Thread(
        target=_run_heartbeat, args=(own, rank, _store_ref), name="cocodiff heartbeat", daemon=True
    )
    heartbeat.start()
    # The process would crash if the thread were inside the store when the interpreter exits.
    atexit.register(_stop_heartbeat, heartbeat)


def _stop_heartbeat(heartbeat: threading.Thread) -> None:
    _stopping.set()
    heartbeat.join(1)


def _run_heartbeat(store: dist.Store, rank: int, store_ref: Callable[[], dist.Store | None]) -> None:
    """Respond to checks, and start one for a missed deadline, until the world is destroyed."""
    global _reported_at
    answered, missed = 0, None
    with contextlib.suppress(RuntimeError):  # the store is closed, so no rank can start a check
        while store_ref() and not _stopping.wait(_HEARTBEAT_SECONDS):
            if _reported_at and time.monotonic() > _reported_at + REPORT_SECONDS:
                _reported_at = None
                store.set(_key(_REPORT, rank), "")
            if (missed is None or missed.is_met()) and (missed := deadline.pop_missed()):
                failure = f"has taken more than {missed.seconds:.0f} s"
                _logger.error("cocodiff: %s", _describe_failure(missed.ranks, str(missed.name), failure))
            # A counter and not a key per check: a rank may be lost between counting a check and setting its key.
            if (number := store.add(_CHECKS, 0)) > answered:
                answered = number
                store.set(_key(_RESPONSE, rank), f"{answered} {_COMMUNICATES if _communicates() else ''}")
        if not hasattr(sys, "last_value"):  # which Python sets before it exits because of an exception
            store.set(_key(_RESPONSE, rank), _ENDED)


def _communicates() -> bool:
    """Return whether this rank is in a collective, on its host or on its device."""
    return bool(_active) or deadline.is_any_in_flight()


def _describe_failure(group: dist.ProcessGroup | Sequence[int], what: str, failure: str) -> str:
    """Check the ranks after a failure and return the message to report."""
    members = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else list(group)
    rank = dist.get_rank()
    causes: list[str] = []

    def check() -> None:
        with contextlib.suppress(RuntimeError):  # the store is closed
            causes.append(_check_ranks(members, rank, what))

    # In a thread, because a request to a store whose host is stopped never returns.
    checker = threading.Thread(target=check, daemon=True)
    checker.start()
    checker.join(2 * RESPONSE_SECONDS)
    no_store = "the rendezvous store does not respond either: the rank that hosts it (usually rank 0) is lost"
    return f"rank {rank}: {what} among ranks {members} {failure}: {(causes or [no_store])[0]}"


def _check_ranks(members: list[int], rank: int, what: str) -> str:
    """Report this rank's failure, ask all ranks to respond, and return the cause that their responses show.

    Raises:
        RuntimeError: the store is closed.
    """
    global _reported_at
    store = _get_default_store().clone()
    store.set(_key(_REPORT, rank), what)
    _reported_at = time.monotonic()
    number = store.add(_CHECKS, 1)

    def state_of(other: int) -> str | None:
        """Return the report or the response of a rank, empty if it did not call a collective; None without either."""
        if reported := _read(store, _REPORT, other):
            return reported
        response = _read(store, _RESPONSE, other) or "0"
        if response == _ENDED and other not in members:
            return response
        answered, _, state = response.partition(" ")
        return state if int(answered) >= number else None

    with_heartbeat = {other for other in range(dist.get_world_size()) if _read(store, _RESPONSE, other) is not None}
    missing, until = set(members) | with_heartbeat, time.monotonic() + RESPONSE_SECONDS
    while (missing := {other for other in missing if state_of(other) is None}) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    if missing:
        return f"{_ranks_are(missing)} lost or unresponsive"
    if absent := {other for other in members if not state_of(other)}:
        return f"{_ranks_are(absent)} alive but did not call it"
    ended = {other for other in with_heartbeat if state_of(other) == _ENDED}
    alive = "all of its ranks are alive and called it: a link between them failed, or one of them is too slow"
    return f"{alive}; {_ranks_are(ended)} not among them and ended earlier" if ended else alive


def _read(store: dist.Store, kind: str, rank: int) -> str | None:
    """Return the value of a rank's key; None if it is not set."""
    key = _key(kind, rank)
    return store.get(key).decode() if store.check([key]) else None


def _key(kind: str, rank: int) -> str:
    return f"cocodiff/failure_detection/{kind}/{rank}"


def _ranks_are(ranks: set[int]) -> str:
    listed = ", ".join(map(str, sorted(ranks)))
    return f"rank {listed} is" if len(ranks) == 1 else f"ranks {listed} are"
