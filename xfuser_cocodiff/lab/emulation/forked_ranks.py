"""Runs a function on every rank of an emulated cluster, in processes forked from this one.

Nothing is imported again: a cell of a benchmark starts 24 ranks in about a second. Processes of one cell::

    caller                  stays as it is, so that it can run one cell after another
      cell                  in new namespaces of users, networks, mounts and processes (`user_namespace.isolated`)
        first process       makes the links, forks the ranks and watches them; all end with it
          rank 0 ... rank N-1   each in its own network namespace

The caller must have a single thread. So it calls :func:`prepare_environment` before it imports torch, computes nothing
in parallel, and leaves `torch.distributed` to the ranks.
"""

import contextlib
import faulthandler
import gc
import itertools
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NoReturn

from xfuser_cocodiff.lab.emulation import namespaces, ranks, user_namespace
from xfuser_cocodiff.lab.emulation.cluster import environment
from xfuser_cocodiff.lab.emulation.links import Cluster
from xfuser_cocodiff.lab.emulation.ranks import STDERR, STDOUT, Failure, Write

ENVIRONMENT = {
    # More than one thread would not survive the fork.
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"),
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # every connection would warn that its address has no host name
}
"""Variables that libraries read when they are loaded, so that ranks cannot set them."""
_DRAIN_SECONDS = 1.0
"""How long to wait for the last message of a rank, and for the stacks that ranks print after a deadline."""


class RankFailedError(RuntimeError):
    """A rank failed, and the other ranks were killed."""

    def __init__(self, failure: Failure, traceback: str = "") -> None:
        super().__init__(f"{failure}\n{traceback}".rstrip())
        self.failure = failure
        self.traceback = traceback
        """Traceback on that rank; empty if it was killed or ended without an exception."""


@dataclass
class _Outcome:
    """Outcome of a cell, sent from its processes to the caller."""

    results: dict[int, bytes] = field(default_factory=dict)
    """Pickled result of each rank."""
    failure: Failure | None = None
    traceback: str = ""
    error: str = ""
    """Why the ranks could not be started."""


def prepare_environment() -> None:
    """Set the environment variables of :data:`ENVIRONMENT`; call this before torch, numpy or numba is imported."""
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
        message = _read(read_end, None if deadline is None else deadline + _DRAIN_SECONDS)
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
    outcome: _Outcome = pickle.loads(message)
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
        _send(write_end, _Outcome(error=str(error)))
    except BaseException:
        _send(write_end, _Outcome(error=traceback.format_exc()))
    finally:
        os._exit(status)


def _with_deadline(work: Callable[[int], Any], deadline: float | None) -> Callable[[int], Any]:
    """Return `work` with the stacks of all threads printed to stderr at the deadline, a value of `time.monotonic`."""

    def limited(rank: int) -> Any:
        if deadline is not None:
            faulthandler.dump_traceback_later(max(0.001, deadline - time.monotonic()), file=STDERR)
        return work(rank)

    return limited


def _send(write_end: int, outcome: _Outcome) -> None:
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
        _send(write_end, _Outcome(error=str(error)))
        return 1
    gc.freeze()  # a collection on a rank would write to all objects, and so copy the memory that ranks share
    release_read, release_write = os.pipe()
    started: list[_Rank] = []
    for rank in range(cluster.size):
        inherited = [write_end, release_write, *itertools.chain.from_iterable(each.descriptors() for each in started)]
        started.append(_fork(cluster, rank, work, rank in results_of, release_read, inherited))
    os.close(release_read)
    mail = _Mail([each.messages for each in started], release_write)
    failure = ranks.watch([each.process for each in started], write)
    messages = mail.all()
    if failure is None:
        _send(write_end, _Outcome({rank: messages[rank].content for rank in results_of}))
        return 0
    failure, text = _cause(failure, messages)
    _send(write_end, _Outcome(failure=failure, traceback=text))
    return failure.status


def _cause(noticed: Failure, messages: "dict[int, _Message]") -> tuple[Failure, str]:
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


@dataclass(frozen=True)
class _Message:
    """Last message of a rank."""

    has_returned: bool
    content: bytes
    """Pickled result, empty if nobody asked for it; the traceback of a rank that failed."""
    seconds: float = field(default_factory=time.monotonic)
    """When the rank returned or failed, on a clock that all ranks share."""


@dataclass(frozen=True)
class _Rank:
    """A forked rank."""

    process: ranks.Process
    messages: IO[bytes]
    """Read end of a pipe for its last message."""

    def descriptors(self) -> list[int]:
        """Return the descriptors that other ranks inherit and must close."""
        return [pipe.fileno() for pipe in (*self.process.outputs.values(), self.messages)]


class _Mail:
    """Last messages of all ranks. Threads read them, and let the ranks end once all have returned."""

    def __init__(self, pipes: Sequence[IO[bytes]], release: int) -> None:
        self._messages: dict[int, _Message] = {}
        self._lock = threading.Lock()
        self._missing = len(pipes)
        self._release = release
        self._readers = [threading.Thread(target=self._read, args=each, daemon=True) for each in enumerate(pipes)]
        for reader in self._readers:
            reader.start()

    def _read(self, rank: int, pipe: IO[bytes]) -> None:
        with contextlib.suppress(EOFError, pickle.UnpicklingError):  # it was killed
            message: _Message = pickle.load(pipe)
            with self._lock:
                self._messages[rank] = message
                self._missing -= message.has_returned
                if not self._missing:
                    os.close(self._release)

    def all(self) -> dict[int, _Message]:
        """Return the messages by rank, once all ranks have ended; a rank that was killed has none."""
        for reader in self._readers:
            reader.join(_DRAIN_SECONDS)
        with self._lock:
            return dict(self._messages)


def _fork(
    cluster: Cluster, rank: int, work: Callable[[int], Any], has_result: bool, release: int, inherited: Sequence[int]
) -> _Rank:
    """Fork a rank.

    Args:
        cluster: the cluster, whose namespaces exist.
        rank: its number.
        work: called with the rank.
        has_result: whether it sends what `work` returns.
        release: read end of a pipe, at whose end the rank may end.
        inherited: descriptors that the rank closes.
    """
    output, error, message = os.pipe(), os.pipe(), os.pipe()
    number = os.fork()
    if not number:
        for descriptor in (*inherited, output[0], error[0], message[0]):
            os.close(descriptor)
        _run_rank(cluster, rank, work, has_result, (output[1], error[1], message[1], release))
    for _, descriptor in (output, error, message):
        os.close(descriptor)
    pipes = {STDOUT: os.fdopen(output[0], "rb"), STDERR: os.fdopen(error[0], "rb")}
    return _Rank(ranks.Process(number, pipes), os.fdopen(message[0], "rb"))


def _run_rank(
    cluster: Cluster, rank: int, work: Callable[[int], Any], has_result: bool, pipes: tuple[int, int, int, int]
) -> NoReturn:
    """Run a rank and end.

    Args:
        cluster: the cluster.
        rank: its number.
        work: called with the rank.
        has_result: whether to send what `work` returns.
        pipes: write ends for stdout, stderr and the last message; read end of the release.
    """
    output, error, messages, release = pipes
    status = 1
    try:
        os.setsid()
        _redirect(output, error)
        user_namespace.enter_network(namespaces.FOLDER / namespaces.name(rank))
        os.environ.update(environment(cluster, rank, os.environ))
        if "torch" in sys.modules:  # which was loaded with another number
            sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        result = work(rank)
        message = _Message(True, pickle.dumps(result) if has_result else b"")
        status = 0
    except BaseException:
        message = _Message(False, traceback.format_exc().encode())
    try:
        with os.fdopen(messages, "wb") as pipe:
            pickle.dump(message, pipe)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if status == 0:
            os.read(release, 1)  # returns once all ranks have closed it
    finally:
        os._exit(status)


def _redirect(output: int, error: int) -> None:
    """Connect stdin to nothing, and stdout and stderr to pipes."""
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (error, 2)):
        os.dup2(source, target)
        os.close(source)
    # The caller's own may lead elsewhere, as in a notebook.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
