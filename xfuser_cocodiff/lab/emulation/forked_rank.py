"""Forks a rank of an emulated cluster, and reads the last messages that ranks send to the process that forked them."""

import contextlib
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NoReturn

from xfuser_cocodiff.lab.emulation import namespaces, ranks, user_namespace
from xfuser_cocodiff.lab.emulation.cluster import environment
from xfuser_cocodiff.lab.emulation.links import Cluster
from xfuser_cocodiff.lab.emulation.ranks import STDERR, STDOUT

DRAIN_SECONDS = 1.0
"""How long to wait for the last message of a rank, or for what it prints at the end."""


@dataclass(frozen=True)
class LastMessage:
    """Last message of a rank."""

    has_returned: bool
    content: bytes
    """Pickled result, empty if nobody asked for it; the traceback of a rank that failed."""
    seconds: float = field(default_factory=time.monotonic)
    """When the rank returned or failed, on a clock that all ranks share."""


@dataclass(frozen=True)
class ForkedRank:
    """A forked rank."""

    process: ranks.Process
    messages: IO[bytes]
    """Read end of a pipe for its last message."""

    def descriptors(self) -> list[int]:
        """Return the descriptors that other ranks inherit and must close."""
        return [pipe.fileno() for pipe in (*self.process.outputs.values(), self.messages)]


class LastMessages:
    """Last messages of all ranks. Threads read them, and let the ranks end once all have returned."""

    def __init__(self, pipes: Sequence[IO[bytes]], release: int) -> None:
        self._messages: dict[int, LastMessage] = {}
        self._lock = threading.Lock()
        self._missing = len(pipes)
        self._release = release
        self._readers = [threading.Thread(target=self._read, args=each, daemon=True) for each in enumerate(pipes)]
        for reader in self._readers:
            reader.start()

    def _read(self, rank: int, pipe: IO[bytes]) -> None:
        with contextlib.suppress(EOFError, pickle.UnpicklingError):  # it was killed
            message: LastMessage = pickle.load(pipe)
            with self._lock:
                self._messages[rank] = message
                self._missing -= message.has_returned
                if not self._missing:
                    os.close(self._release)

    def all(self) -> dict[int, LastMessage]:
        """Return the messages by rank, once all ranks have ended; a rank that was killed has none."""
        for reader in self._readers:
            reader.join(DRAIN_SECONDS)
        with self._lock:
            return dict(self._messages)


def fork(
    cluster: Cluster, rank: int, work: Callable[[int], Any], has_result: bool, release: int, inherited: Sequence[int]
) -> ForkedRank:
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
    return ForkedRank(ranks.Process(number, pipes), os.fdopen(message[0], "rb"))


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
        message = LastMessage(True, pickle.dumps(result) if has_result else b"")
        status = 0
    except BaseException:
        message = LastMessage(False, traceback.format_exc().encode())
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
