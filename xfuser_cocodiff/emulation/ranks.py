"""Processes of an emulated cluster: a command once per rank, stopped all together, and their output line by line."""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from xfuser_cocodiff.emulation.interruption import Interruption

GRACE_SECONDS = 10.0
"""How long ranks may take to end after SIGTERM; a launcher among them has ranks of its own to stop."""

STDOUT, STDERR = 1, 2
PIPE_BYTES = 1 << 20
"""No less than a pipe holds."""

Write = Callable[[int, int, bytes], None]
"""What is called with rank, `STDOUT` or `STDERR`, and a line, as lines come."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Failure:
    """The first rank that failed."""

    rank: int
    returncode: int
    """As subprocess has it: negative for a signal."""

    @property
    def status(self) -> int:
        """Exit status as a shell has it."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    def __str__(self) -> str:
        if self.returncode < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.returncode).name}"
        return f"rank {self.rank} failed with exit status {self.returncode}"


@dataclass
class _Stream:
    """One output of one rank."""

    rank: int
    descriptor: int
    pipe: IO[bytes]
    line: bytes = b""


class Ranks:
    """A command that runs once per rank. As a context, it leaves none of these processes behind."""

    def __init__(self, interruption: Interruption, write: Write) -> None:
        self._interruption = interruption
        self._write = write
        self._failure: Failure | None = None
        self._running: dict[int, subprocess.Popen] = {}
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._selector.close()

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the command as a rank.

        Raises:
            OSError: there is no such program.
        """
        process = subprocess.Popen(
            command,
            bufsize=0,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_launcher,
        )
        self._running[rank] = process
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, rank)
        assert process.stdout and process.stderr
        for descriptor, pipe in ((STDOUT, process.stdout), (STDERR, process.stderr)):
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, _Stream(rank, descriptor, pipe))

    def wait(self) -> Failure | None:
        """Wait until all ranks have ended or one has failed, which ends the others, and return that failure.

        Raises:
            InterruptionError: this process was asked to stop.
        """
        self._selector.register(self._interruption, selectors.EVENT_READ)
        while self._running and not self._failure:
            self._interruption.check()
            self._follow(None)
        self._selector.unregister(self._interruption)
        self._stop()
        return self._failure

    def _stop(self) -> None:
        """End the ranks that still run: first politely, so that launchers among them can stop theirs."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._interruption)
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while self._running and (left := deadline - time.monotonic()) > 0:
            self._follow(left)
        self._signal(signal.SIGKILL)
        while self._running:
            self._follow(None)

    def _signal(self, number: int) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def _follow(self, seconds: float | None) -> None:
        """Wait for the next thing to happen, and deal with it."""
        for key, _ in self._selector.select(seconds):
            if isinstance(key.data, _Stream):
                self._pump(key.data)
            elif key.data in self._running:
                self._ended(key.data, key.fd)

    def _ended(self, rank: int, descriptor: int) -> None:
        """Note how a rank ended; a process that it left behind may hold its output open, and is not waited for."""
        process = self._running.pop(rank)
        process.wait()
        self._selector.unregister(descriptor)
        os.close(descriptor)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Stream) and key.data.rank == rank:
                self._pump(key.data)
                self._close(key.data)
        if process.returncode != 0 and self._failure is None:
            self._failure = Failure(rank, process.returncode)

    def _pump(self, stream: _Stream) -> None:
        """Pass on the lines that a stream has now; one read empties a pipe, and others want their turn."""
        if stream.pipe.closed or (data := stream.pipe.read(PIPE_BYTES)) is None:
            return
        *lines, stream.line = (stream.line + data).split(b"\n")
        for line in lines:
            self._write(stream.rank, stream.descriptor, line)
        if not data:
            self._close(stream)

    def _close(self, stream: _Stream) -> None:
        if not stream.pipe.closed:
            self._selector.unregister(stream.pipe)
            stream.pipe.close()
            if stream.line:
                self._write(stream.rank, stream.descriptor, stream.line)


def _die_with_launcher() -> None:
    """Have the kernel end a rank whose launcher is killed and so cannot."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
