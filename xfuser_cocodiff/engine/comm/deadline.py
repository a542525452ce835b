"""Deadlines of communication that the host does not wait for, such as operations on an accelerator's stream.

There the backend's watchdog ends the process without giving Python a chance to report. The thread of failure detection
starts a check for an operation that has missed its deadline, before the watchdog acts.
"""

import collections
import contextlib
import ctypes
import threading
import time
from collections.abc import Sequence

import torch

CHECK_SECONDS = 20.0
"""Longest time of a check, by which a deadline precedes the backend's timeout."""
_CAPTURE_MODE_RELAXED = 2
"""Capture mode of CUDA and HIP in which a thread may query events while another thread captures a graph."""


class Deadline:
    """Deadline of an operation that starts now; whoever queues it sets `end` afterwards.

    Args:
        ranks: the ranks that take part.
        name: object whose `str` names the operation in messages.
        timeout: timeout of the backend in seconds.
    """

    __slots__ = ("at", "end", "name", "ranks", "seconds")

    def __init__(self, ranks: Sequence[int], name: object, timeout: float) -> None:
        self.ranks, self.name = ranks, name
        self.seconds = max(timeout - CHECK_SECONDS, timeout / 2)
        self.at = time.monotonic() + self.seconds
        self.end: torch.Event | None = None
        """Event behind the operation; it keeps no tensors alive, which the work of a collective would."""
        with _lock:
            while _pending and _pending[0].is_met():
                _pending.popleft()
            _pending.append(self)

    def is_met(self) -> bool:
        """Return whether the operation is over."""
        return self.end is not None and self.end.query()


_pending: collections.deque[Deadline] = collections.deque(maxlen=10_000)
"""Deadlines that may not have been met yet, oldest first. Events are queried only when one is added or missed."""
_lock = threading.Lock()


def forget_all() -> None:
    """Forget all deadlines, such as those of an earlier world."""
    _pending.clear()


def pop_missed() -> Deadline | None:
    """Return the oldest deadline that has been missed, if there is one; each is returned once."""
    with _lock:
        while _pending and _pending[0].at < time.monotonic() and _may_query_events():
            first = _pending.popleft()
            if not first.is_met():
                return first
    return None


def is_any_in_flight() -> bool:
    """Return whether an operation is not over."""
    with _lock:
        return _may_query_events() and not all(each.is_met() for each in _pending)


def _may_query_events() -> bool:
    """Return whether this thread may query events, after asking for it.

    By CUDA's default, a query from any thread invalidates a graph that another thread is capturing.
    """
    if not torch.cuda.is_initialized():
        return True
    for library, name in (
        ("libcuda.so.1", "cuThreadExchangeStreamCaptureMode"),
        ("libamdhip64.so", "hipThreadExchangeStreamCaptureMode"),
    ):
        with contextlib.suppress(OSError, AttributeError):
            return getattr(ctypes.CDLL(library), name)(ctypes.byref(ctypes.c_int(_CAPTURE_MODE_RELAXED))) == 0
    return False
