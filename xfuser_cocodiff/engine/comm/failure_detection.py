"""Finds out which rank is gone when ranks fail to communicate, so that each can say so before it leaves.

Every rank keeps a thread that listens at the rendezvous store. A rank that fails to communicate calls the roll there:
who does not answer is gone or stopped, and whose answer is that it does not communicate has not come to the exchange.
Calls are numbered, and each is answered anew. What a rank says that fails itself stays: one that left because of
another's failure is not taken for its cause.

On an accelerator the host does not wait for an exchange, and the backend's watchdog ends the process without a word to
Python. There the listener is told of exchanges, and calls the roll for one that is overdue, before the watchdog acts.
"""

import atexit
import collections
import contextlib
import ctypes
import functools
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

RESPONSE_SECONDS = 10.0
"""How long a rank may take to answer."""
_LISTEN_SECONDS, _POLL_SECONDS = 0.5, 0.05
_CALLS = "cocodiff/roll_call/calls"
_RELAXED = 2
"""CUDA's and HIP's mode of a thread that may ask an event while another one captures a graph."""

_logger = logging.getLogger("xfuser_cocodiff")
_BACKENDS = re.compile(r"gloo|ccl|timed? ?out|connection|socket|broken pipe|peer", re.IGNORECASE)
"""What backends say when they fail, whose errors have no type of their own."""
_MEMORY = re.compile(r"out of memory|n.t allocate|cannot allocate|not enough memory|bad_alloc", re.IGNORECASE)

_stages: dict[int, str] = {}
"""What each thread of this rank communicates in at the moment, by its number: a lane has a thread of its own."""
_attended: Callable[[], dist.Store | None] = type(None)
"""A weak reference to the store that this rank listens at; before there is one, something that gives None as well."""
_leaving = threading.Event()
_failed: dist.ProcessGroup | list[int] | None = None
"""The group in which this rank has failed last."""
_recovered = threading.Event()
"""Set once it has communicated in it again, until the listener has taken back that it fails."""


def _note_failure(group: dist.ProcessGroup | list[int] | None) -> None:
    global _failed
    _failed = group
    _recovered.clear()


class UnresponsiveRankError(RuntimeError):
    """Ranks failed to communicate because one of them is gone or does not answer."""


class report_failed_ranks:  # noqa: N801 (reads as what it does; a class costs a third of a generator)
    """Context in which a failure to communicate becomes an error that names the ranks to blame.

    Args:
        group: the ranks that wait for each other in it.
        stage: its name, for the message.
    """

    __slots__ = ("before", "failed", "group", "stage")

    def __init__(self, group: dist.ProcessGroup | list[int], stage: str) -> None:
        self.group, self.stage = group, stage

    def __enter__(self) -> None:
        """Note that this rank communicates."""
        thread = threading.get_ident()
        self.before, self.failed = _stages.get(thread), _failed
        _stages[thread] = self.stage

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, UnresponsiveRankError):
            return  # it stays known where this rank was
        if error is not None and is_backend_error(error):
            _note_failure(self.group)
            raise UnresponsiveRankError(_explained(self.group, self.stage, f"failed ({error})")) from None
        if error is None and self.failed is self.group is _failed:
            _recovered.set()  # in a stage that began after the failure, with the same ranks
        if self.before is None:
            _stages.pop(threading.get_ident(), None)
        else:
            _stages[threading.get_ident()] = self.before


def is_backend_error(error: BaseException) -> bool:
    """Whether an error is one that a backend of torch.distributed raises when ranks do not come together: not that
    memory ran out, in the backend or elsewhere, nor what tensors are to blame for."""
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError) or _MEMORY.search(str(error)):
        return False
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and bool(_BACKENDS.search(str(error))))


class _Expected(NamedTuple):
    """An exchange that is under way on a device."""

    is_done: Callable[[], bool]
    deadline: float
    group: dist.ProcessGroup | list[int]
    stage: str
    seconds: float


_expected: collections.deque[_Expected] = collections.deque(maxlen=10_000)
"""Those that may not be done yet, oldest first."""
_expecting = threading.Lock()


def set_deadline(is_done: Callable[[], bool], group: dist.ProcessGroup | list[int], stage: str, timeout: float) -> None:
    """Have the roll called for an exchange that the host does not wait for, should it not come to its end.

    What comes of it is logged on this rank, in time before the backend's timeout, whose watchdog ends the process.
    Nothing is asked of the device but here, and once an exchange is overdue.

    Args:
        is_done: whether it has ended, as `query` of the event behind it, or `is_completed` of its work.
        group: the ranks that wait for each other in it.
        stage: its name, for the message.
        timeout: seconds after which the backend gives up.
    """
    if not is_heartbeat_running():
        return
    seconds = max(timeout - 2 * RESPONSE_SECONDS, timeout / 2)
    with _expecting:
        while _expected and _expected[0].is_done():
            _expected.popleft()
        _expected.append(_Expected(is_done, time.monotonic() + seconds, group, stage, seconds))


def _overdue() -> _Expected | None:
    """Return an exchange that should have ended by now, and has not."""
    with _expecting:
        while _expected and _expected[0].deadline < time.monotonic() and _may_query():
            first = _expected.popleft()
            if not first.is_done():
                return first
    return None


def _may_query() -> bool:
    """Return whether the listener may ask events: by CUDA's default, a graph that another thread captures is invalid if
    any thread does so meanwhile."""
    return not torch.cuda.is_initialized() or _relax()


@functools.cache
def _relax() -> bool:
    """Have the calling thread, for good, spoil no capture of another one; returns whether it is so."""
    for library, name in (
        ("libcuda.so.1", "cuThreadExchangeStreamCaptureMode"),
        ("libamdhip64.so", "hipThreadExchangeStreamCaptureMode"),
    ):
        with contextlib.suppress(OSError, AttributeError):
            return getattr(ctypes.CDLL(library), name)(ctypes.byref(ctypes.c_int(_RELAXED))) == 0
    return False


def is_heartbeat_running() -> bool:
    """Whether this rank answers when the roll is called."""
    return _attended() is not None


def start_heartbeat() -> None:
    """Answer from now on when the roll is called; every rank that may be waited for must have done so."""
    global _attended
    store = _get_default_store()
    if _attended() is not store:
        _attended = weakref.ref(store)
        # A connection of its own: the other one is taken while this rank waits for a key.
        own, rank = store.clone(), dist.get_rank()
        own.set(_key("answers", rank), "0 ")
        _expected.clear()  # of another world
        _note_failure(None)
        listener = threading.Thread(target=_listen, args=(own, rank, _attended), name="roll call", daemon=True)
        listener.start()
        # It must not be inside the store when the interpreter ends, or the process would crash then.
        atexit.register(_leave, listener)


def _leave(listener: threading.Thread) -> None:
    _leaving.set()
    listener.join(1)


def _listen(store: dist.Store, rank: int, attended: Callable[[], dist.Store | None]) -> None:
    """Answer calls of the roll until the world is torn down, and call it for what is overdue."""
    _relax.cache_clear()  # of another thread
    answered, late = 0, None
    with contextlib.suppress(RuntimeError):  # the store is gone, and with it whoever could ask
        while attended() and not _leaving.wait(_LISTEN_SECONDS):
            if late and late.is_done():  # a false alarm
                store.set(_key("fails", rank), "")
                late = None
            if late is None and _recovered.is_set():
                _note_failure(None)
                store.set(_key("fails", rank), "")
            if late is None and (late := _overdue()):
                failure = f"has taken more than {late.seconds:.0f} s"
                _logger.error("cocodiff: %s", _explained(late.group, late.stage, failure))
            # A counter, and not a key for each call, which a caller may be lost before it sets.
            if (number := store.add(_CALLS, 0)) > answered:
                answered = number
                store.set(_key("answers", rank), f"{answered} {_now()}")


def _now() -> str:
    """Return what this rank communicates in, on its host or on its device."""
    under_way = []
    if _may_query():
        with _expecting:
            under_way = [each.stage for each in _expected if not each.is_done()][:1]
    return ", ".join([*_stages.values(), *under_way])


def _explained(group: dist.ProcessGroup | list[int], stage: str, failure: str) -> str:
    """What to say of communication that failed."""
    members, here = group if isinstance(group, list) else dist.get_process_group_ranks(group), dist.get_rank()
    findings: list[str] = []

    def call() -> None:
        with contextlib.suppress(RuntimeError):  # there is no store to ask
            findings.append(_call(members, here, stage))

    # In a thread, because a store whose host was stopped never returns.
    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(2 * RESPONSE_SECONDS)
    nobody = "the rendezvous store does not answer either, so the rank that hosts it (usually rank 0) is gone"
    finding = findings[0] if findings else nobody
    return f"rank {here}: communication along {stage!r} among ranks {members} {failure}: {finding}"


def _call(members: list[int], here: int, stage: str) -> str:
    """Call the roll and say what came of it; raises where there is no store to ask."""
    store = _get_default_store().clone()
    store.set(_key("fails", here), stage)
    number = store.add(_CALLS, 1)

    def said(rank: int) -> str | None:
        """What a rank communicates in; None where it does not answer."""
        if failed := _read(store, "fails", rank):
            return failed
        answered, _, now = (_read(store, "answers", rank) or "0").partition(" ")
        return now if int(answered) >= number else None

    attending = {rank for rank in range(dist.get_world_size()) if _read(store, "answers", rank) is not None}
    missing, deadline = set(members) | attending, time.monotonic() + RESPONSE_SECONDS
    while missing and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        missing = {rank for rank in missing if said(rank) is None}
    if missing:
        return f"{_ranks(missing)} lost or unresponsive"
    if absent := {rank for rank in members if not said(rank)}:
        return f"{_ranks(absent)} alive but did not call it"
    return "all of its ranks are alive and called it: a link between them failed, or one of them is too slow"


def _read(store: dist.Store, kind: str, rank: int) -> str | None:
    """Read what a rank has said, if it has."""
    key = _key(kind, rank)
    return store.get(key).decode() if store.check([key]) else None


def _key(kind: str, number: int) -> str:
    return f"cocodiff/roll_call/{kind}/{number}"


def _ranks(numbers: set[int]) -> str:
    listed = ", ".join(map(str, sorted(numbers)))
    return f"rank {listed} is" if len(numbers) == 1 else f"ranks {listed} are"
