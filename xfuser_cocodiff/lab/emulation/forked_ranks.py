"""Runs a function on every rank of an emulated cluster, in processes forked from this one.

Nothing is imported again: a cell of a benchmark starts 24 ranks in about a second. Processes of one cell::

    caller                  stays as it is, so that it can run one cell after another
      cell                  in new namespaces of users, networks, mounts and processes (`user_namespace.isolated`)
        first process       makes the links, forks the ranks and watches them; all end with it
          rank 0 ... rank N-1   each in its own network namespace

The caller must have a single thread. So it calls :func:`prepare_environment` before it imports torch, computes nothing
in parallel, and leaves `torch.distributed` to the ranks.
"""

import faulthandler
import gc
import itertools
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NoReturn

from xfuser_cocodiff.lab.emulation import namespaces, ranks, user_namespace
from xfuser_cocodiff.lab.emulation.forked_rank import DRAIN_SECONDS, ForkedRank, LastMessage, LastMessages, fork
from xfuser_cocodiff.lab.emulation.links import Cluster
from xfuser_cocodiff.lab.emulation.ranks import STDERR, Failure, Write

ENVIRONMENT = {
    # More than one thread would not survive the fork.
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # every connection would warn that its address has no host name
}
"""Variables that libraries read when they are loaded, so that ranks cannot set them."""


class RankFailedError(RuntimeError):
    """A rank failed, and the other ranks were killed."""

    def __init__(self, failure: Failure, traceback: str = "") -> None:
        super().__init__(f"{failure}\n{traceback}".rstrip())
        self.failure = failure
        self.traceback = traceback
        """Traceback on that rank; empty if it was killed or ended without an exception."""


@dataclass
class _CellOutcome:
    """Outcome of a cell, sent from its processes to the caller."""

    results: dict[int, bytes] = field(default_factory=dict)
    """Pickled result of each rank."""
    failure: Failure | None = None
    traceback: str = ""
    error: str = ""
    """Why the ranks could not be started."""


def prepare_environment() -> None:
    """Set the environment variables of :data:`ENVIRONMENT`; call this before torch or numpy is imported."""
    os.environ.update(ENVIRONMENT)


def run_forked(
    cluster: Cluster,
    work: Callable[[int], Any],
    *,
    results_of: Collection[int] = (0,),
    deadline_seconds: float | None = None,
    write: Write = ranks.print_line,
) -> dict[int, Any]:
    """Call `work(rank)` in a forked process per rank of an emulated cluster, until all have returned or one has failed.

    A rank has the environment variables that torchrun sets, and random generators in the caller's state, the same on
    all ranks. It ends without destructors or `atexit` functions after `work` has returned on all ranks, so that no
    connection closes too early. Whatever its processes started ends with the cell.

    Args:
        cluster: topology, rates and addresses.
        work: called with the rank. It may be a closure, since nothing is pickled but results.
        results_of: ranks whose results, which must be picklable, are returned.
        deadline_seconds: time after which every rank prints the stacks of its threads and the cell is stopped; None for
            no limit.
        write: called for each line that a rank prints, in a process of the cell: rank, stdout or stderr (1 or 2), line.

    Returns:
        Results by rank.

    Raises:
        RankFailedError: a rank raised an exception or was killed; names the first one.
        TimeoutError: the deadline has passed.
        RuntimeError: this process has several threads, this machine permits no namespaces, or the cell was killed.
    """
    _check_single_thread()
    deadline = None if deadline_seconds is None else time.monotonic() + deadline_seconds
    for output in (sys.stdout, sys.stderr):
        output.flush()  # or both processes would write what is buffered
    work = _with_deadline(work, deadline)
    caller, (read_end, write_end) = os.getpid(), os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, user_namespace.STOP_SIGNALS)
    cell = os.fork()
    if not cell:
        os.close(read_end)
        _run_cell(caller, lambda: _run_ranks(cluster, work, results_of, write_end, write), write_end)
    os.close(write_end)
    has_ended = False
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        message = _read(read_end, None if deadline is None else deadline + DRAIN_SECONDS)
        has_ended = True
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, user_namespace.STOP_SIGNALS)
        os.close(read_end)
        if not has_ended:
            os.kill(cell, signal.SIGTERM)
        status = os.waitstatus_to_exitcode(os.waitpid(cell, 0)[1])
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return _results(message, status)


def _results(message: bytes, status: int) -> dict[int, Any]:
    """Return the results in the message of a cell, or raise the error that it contains."""
    if not message:
        raise RuntimeError(f"the emulated cluster ended with status {status} before its ranks had results")
    outcome: _CellOutcome = pickle.loads(message)
    if outcome.failure is not None:
        raise RankFailedError(outcome.failure, outcome.traceback)
    if outcome.error:
        raise RuntimeError(outcome.error)
    return {rank: pickle.loads(result) for rank, result in sorted(outcome.results.items())}


def _check_single_thread() -> None:
    """Raise RuntimeError if this process has several threads: the locks that they hold would stay locked in a fork."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(
            f"ranks are forked from a process with a single thread, and this one has {threads}; call "
            "prepare_environment() before torch is imported, and initialize torch.distributed only on the ranks"
        )


def _read(pipe: int, deadline: float | None) -> bytes:
    """Read a pipe to its end.

    Raises:
        TimeoutError: the deadline, a value of `time.monotonic`, has passed.
    """
    parts: list[bytes] = []
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([pipe], [], [], left)[0]:
            raise TimeoutError("the ranks of an emulated cluster did not end before their deadline")
        part = os.read(pipe, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)


# In the processes of a cell.


def _run_cell(caller: int, work: Callable[[], int], write_end: int) -> NoReturn:
    """Run the first process of a cell in new namespaces, and end.

    Args:
        caller: process ID of the parent.
        work: what the first process does; returns its exit status.
        write_end: pipe to the caller.
    """
    status = 1
    try:
        user_namespace.end_with_parent(caller)
        os.setsid()  # Ctrl-C is for the caller
        status = user_namespace.isolated(work)
    except user_namespace.StoppedError as error:
        status = error.status
    except RuntimeError as error:
        _send(write_end, _CellOutcome(error=str(error)))
    except BaseException:
        _send(write_end, _CellOutcome(error=traceback.format_exc()))
    finally:
        os._exit(status)


def _with_deadline(work: Callable[[int], Any], deadline: float | None) -> Callable[[int], Any]:
    """Return `work` with the stacks of all threads printed to stderr at the deadline, a value of `time.monotonic`."""

    def limited(rank: int) -> Any:
        if deadline is not None:
            faulthandler.dump_traceback_later(max(0.001, deadline - time.monotonic()), file=STDERR)
        return work(rank)

    return limited


def _send(write_end: int, outcome: _CellOutcome) -> None:
    """Send the outcome to the caller and close the pipe."""
    with os.fdopen(write_end, "wb") as pipe:
        pipe.write(pickle.dumps(outcome))


def _run_ranks(
    cluster: Cluster, work: Callable[[int], Any], results_of: Collection[int], write_end: int, write: Write
) -> int:
    """Make the links of a cluster, run its ranks, and send their outcome to the caller. Return the exit status."""
    try:
        namespaces.make(cluster)
    except RuntimeError as error:
        _send(write_end, _CellOutcome(error=str(error)))
        return 1
    gc.freeze()  # a collection on a rank would write to all objects, and so copy the memory that ranks share
    release_read, release_write = os.pipe()
    started: list[ForkedRank] = []
    for rank in range(cluster.size):
        inherited = [write_end, release_write, *itertools.chain.from_iterable(each.descriptors() for each in started)]
        started.append(fork(cluster, rank, work, rank in results_of, release_read, inherited))
    os.close(release_read)
    last_messages = LastMessages([each.messages for each in started], release_write)
    failure = ranks.watch([each.process for each in started], write)
    messages = last_messages.all()
    if failure is None:
        _send(write_end, _CellOutcome({rank: messages[rank].content for rank in results_of}))
        return 0
    failure, text = _cause(failure, messages)
    _send(write_end, _CellOutcome(failure=failure, traceback=text))
    return failure.status


def _cause(noticed: Failure, messages: dict[int, LastMessage]) -> tuple[Failure, str]:
    """Return the failure to report and its traceback.

    Args:
        noticed: the failure that was noticed first. Ranks that communicate with one that fails soon fail too, and may
            end before it.
        messages: last messages of ranks.
    """
    raised = {rank: message for rank, message in messages.items() if not message.has_returned}
    if noticed.rank not in raised:  # it was killed, or has ended without an exception
        return noticed, ""
    first = min(raised, key=lambda rank: raised[rank].seconds)
    return Failure(first, 1), raised[first].content.decode()
