"""Failure detection: names the unresponsive ranks when a collective fails or is overdue.

Every rank runs a heartbeat thread at the rendezvous store. A rank whose collective fails starts a check there: ranks
that do not respond are lost or stopped, and ranks that respond without being in a collective did not call it. Checks
are numbered, and each needs a new response. A rank that fails itself leaves a report, so that a rank that exits because
of another rank's failure is not taken for the cause. A rank that ends normally says so: groups without it do not miss
it.

On an accelerator the host does not wait for a collective, and the backend's watchdog ends the process without giving
Python a chance to report. There the heartbeat thread knows the collectives in flight and their deadlines, and starts a
check for an overdue one before the watchdog acts.
"""

import atexit
import collections
import contextlib
import ctypes
import functools
import logging
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

RESPONSE_SECONDS = 10.0
"""Time that a rank has to respond to a check."""
_HEARTBEAT_SECONDS, _POLL_SECONDS = 0.5, 0.05
_CHECKS = "cocodiff/failure_detection/checks"
_RESPONSE, _REPORT = "response", "report"
"""Kinds of store keys of a rank: its latest response to a check, and the stage in which it failed."""
_ENDED = "0 ended"
"""Last response of a rank that has ended normally; it responds to no check."""
_CAPTURE_MODE_RELAXED = 2
"""Capture mode of CUDA and HIP in which a thread may query events while another thread captures a graph."""

_logger = logging.getLogger("xfuser_cocodiff")
_BACKEND_ERRORS = re.compile(r"gloo|ccl|timed? ?out|connection|socket|broken pipe|peer", re.IGNORECASE)
"""Messages of backend errors that have no exception type of their own."""
_OUT_OF_MEMORY = re.compile(r"out of memory|n.t allocate|cannot allocate|not enough memory|bad_alloc", re.IGNORECASE)

_stages: dict[int, str] = {}
"""Stage in which each thread of this rank communicates, by thread identifier: a comm stream has its own thread."""
_store_ref: Callable[[], dist.Store | None] = type(None)
"""Weak reference to the store of the heartbeat; before it starts, a callable that also returns None."""
_stopping = threading.Event()
_failed_group: dist.ProcessGroup | list[int] | None = None
"""Group of this rank's latest failure."""
_known_lost: frozenset[int] = frozenset()
"""Ranks that did not respond to this rank's last check. The next check, such as that of a collective that was in flight
behind the failed one, waits for them only as long as a rank that is back needs to respond."""
_known_lost_until = 0.0
"""Time until which the next check does so; a later one is of another failure."""


class UnresponsiveRankError(RuntimeError):
    """A collective failed because a rank is lost or unresponsive, or did not call it."""


class report_failed_ranks:  # noqa: N801 (used as a function; a class costs a third of a generator)
    """Context manager that turns a backend error into an error that names the ranks at fault.

    Args:
        group: the ranks that take part in the collective.
        stage: name of the collective, for the message.
    """

    __slots__ = ("failed_group", "group", "outer_stage", "stage")

    def __init__(self, group: dist.ProcessGroup | list[int], stage: str) -> None:
        self.group, self.stage = group, stage

    def __enter__(self) -> None:
        """Record that this thread communicates."""
        thread = threading.get_ident()
        self.outer_stage, self.failed_group = _stages.get(thread), _failed_group
        _stages[thread] = self.stage

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        global _failed_group
        if isinstance(error, UnresponsiveRankError):
            return  # the stage stays recorded, for checks of other ranks
        if error is not None and is_backend_error(error):
            _failed_group = self.group
            raise UnresponsiveRankError(_describe_failure(self.group, self.stage, f"failed ({error})")) from None
        if error is None and self.failed_group is self.group is _failed_group:
            _failed_group = None  # a collective of the same ranks succeeded, and it began after the failure
            with contextlib.suppress(RuntimeError):  # the store is closed, so no rank can start a check
                _get_default_store().clone().set(_key(_REPORT, dist.get_rank()), "")
        if self.outer_stage is None:
            _stages.pop(threading.get_ident(), None)
        else:
            _stages[threading.get_ident()] = self.outer_stage


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


class _PendingCollectives(NamedTuple):
    """Collectives in flight on a device."""

    is_done: Callable[[], bool]
    deadline: float
    ranks: Sequence[int]
    name: object
    seconds: float


_pending: collections.deque[_PendingCollectives] = collections.deque(maxlen=10_000)
"""Collectives that may still be in flight, oldest first."""
_pending_lock = threading.Lock()


def set_deadline(is_done: Callable[[], bool], ranks: Sequence[int], name: object, timeout: float) -> None:
    """Set a deadline for collectives that the host does not wait for; if it is missed, a check starts.

    The result of the check is logged before the backend's timeout, at which its watchdog ends the process. The device
    is queried only here and after a deadline.

    Args:
        is_done: whether the collectives have completed, as `query` of an event behind them.
        ranks: the ranks that take part in them.
        name: object whose `str` names them in the message.
        timeout: timeout of the backend in seconds.
    """
    seconds = max(timeout - 2 * RESPONSE_SECONDS, timeout / 2)
    with _pending_lock:
        while _pending and _pending[0].is_done():
            _pending.popleft()
        _pending.append(_PendingCollectives(is_done, time.monotonic() + seconds, ranks, name, seconds))


def _overdue() -> _PendingCollectives | None:
    """Return the oldest collectives that have missed their deadline, if there are any."""
    with _pending_lock:
        while _pending and _pending[0].deadline < time.monotonic() and _may_query_events():
            first = _pending.popleft()
            if not first.is_done():
                return first
    return None


def _may_query_events() -> bool:
    """Return whether the heartbeat thread may query events.

    By CUDA's default, a query from any thread invalidates a graph that another thread is capturing.
    """
    return not torch.cuda.is_initialized() or _relax_capture_mode()


@functools.cache
def _relax_capture_mode() -> bool:
    """Let this thread query events during graph captures of other threads; return whether that succeeded."""
    for library, name in (
        ("libcuda.so.1", "cuThreadExchangeStreamCaptureMode"),
        ("libamdhip64.so", "hipThreadExchangeStreamCaptureMode"),
    ):
        with contextlib.suppress(OSError, AttributeError):
            return getattr(ctypes.CDLL(library), name)(ctypes.byref(ctypes.c_int(_CAPTURE_MODE_RELAXED))) == 0
    return False


def is_heartbeat_running() -> bool:
    """Return whether this rank responds to checks."""
    return _store_ref() is not None


def start_heartbeat() -> None:
    """Start to respond to checks; every rank of the world must call this before its first collective."""
    global _failed_group, _known_lost, _store_ref
    store = _get_default_store()
    if _store_ref() is not store:
        _store_ref = weakref.ref(store)
        # A connection of its own: the default one is blocked while this rank waits for a key.
        own, rank = store.clone(), dist.get_rank()
        own.set(_key(_RESPONSE, rank), "0 ")
        _pending.clear()  # collectives of an earlier world
        _failed_group, _known_lost = None, frozenset()
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
    """Respond to checks, and start one for an overdue collective, until the world is destroyed."""
    _relax_capture_mode.cache_clear()  # the mode belongs to a thread
    answered, late = 0, None
    with contextlib.suppress(RuntimeError):  # the store is closed, so no rank can start a check
        while store_ref() and not _stopping.wait(_HEARTBEAT_SECONDS):
            if late and late.is_done():  # a false alarm
                store.set(_key(_REPORT, rank), "")
                late = None
            if late is None and (late := _overdue()):
                failure = f"has taken more than {late.seconds:.0f} s"
                _logger.error("cocodiff: %s", _describe_failure(late.ranks, str(late.name), failure))
            # A counter and not a key per check: a rank may be lost between counting a check and setting its key.
            if (number := store.add(_CHECKS, 0)) > answered:
                answered = number
                store.set(_key(_RESPONSE, rank), f"{answered} {_active_stages()}")
        if not hasattr(sys, "last_value"):  # which Python sets before it exits because of an exception
            store.set(_key(_RESPONSE, rank), _ENDED)


def _active_stages() -> str:
    """Return the stages in which this rank communicates, on its host or on its device."""
    in_flight = []
    if _may_query_events():
        with _pending_lock:
            in_flight = [str(each.name) for each in _pending if not each.is_done()][:1]
    return ", ".join([*_stages.values(), *in_flight])


def _describe_failure(group: dist.ProcessGroup | Sequence[int], stage: str, failure: str) -> str:
    """Check the ranks after a failure and return the message to report."""
    members = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else list(group)
    rank = dist.get_rank()
    causes: list[str] = []

    def check() -> None:
        with contextlib.suppress(RuntimeError):  # the store is closed
            causes.append(_check_ranks(members, rank, stage))

    # In a thread, because a request to a store whose host is stopped never returns.
    checker = threading.Thread(target=check, daemon=True)
    checker.start()
    checker.join(2 * RESPONSE_SECONDS)
    no_store = "the rendezvous store does not respond either: the rank that hosts it (usually rank 0) is lost"
    return f"rank {rank}: communication along {stage!r} among ranks {members} {failure}: {(causes or [no_store])[0]}"


def _check_ranks(members: list[int], rank: int, stage: str) -> str:
    """Report this rank's failure, ask all ranks to respond, and return the cause that their responses show.

    Raises:
        RuntimeError: the store is closed.
    """
    global _known_lost, _known_lost_until
    store = _get_default_store().clone()
    store.set(_key(_REPORT, rank), stage)
    number = store.add(_CHECKS, 1)

    def stages_of(other: int) -> str | None:
        """Return the stages of a rank; None if it has not responded."""
        if reported := _read(store, _REPORT, other):
            return reported
        response = _read(store, _RESPONSE, other) or "0"
        if response == _ENDED and other not in members:
            return response
        answered, _, stages = response.partition(" ")
        return stages if int(answered) >= number else None

    with_heartbeat = {other for other in range(dist.get_world_size()) if _read(store, _RESPONSE, other) is not None}
    missing, began = set(members) | with_heartbeat, time.monotonic()
    while missing:
        is_known = missing <= _known_lost and began < _known_lost_until
        seconds = 2 * _HEARTBEAT_SECONDS if is_known else RESPONSE_SECONDS
        if time.monotonic() >= began + seconds:
            break
        time.sleep(_POLL_SECONDS)
        missing = {other for other in missing if stages_of(other) is None}
    _known_lost, _known_lost_until = frozenset(missing), time.monotonic() + RESPONSE_SECONDS
    if missing:
        return f"{_ranks_are(missing)} lost or unresponsive"
    if absent := {other for other in members if not stages_of(other)}:
        return f"{_ranks_are(absent)} alive but did not call it"
    ended = {other for other in with_heartbeat if stages_of(other) == _ENDED}
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
