"""Processes of an emulated cluster: one command per rank, with its output line by line."""

import contextlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

STDOUT, STDERR = 1, 2
_DRAIN_SECONDS = 1.0
"""How long to read output after a rank has ended whose children still hold the pipe open."""

Write = Callable[[int, int, bytes], None]
"""Callback for each line of output: rank, `STDOUT` or `STDERR`, line."""


@dataclass(frozen=True)
class Failure:
    """The first rank that failed."""

    rank: int
    returncode: int
    """Return code of subprocess: negative for a signal."""

    @property
    def status(self) -> int:
        """Return the exit status as a shell reports it."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    def __str__(self) -> str:
        if self.returncode < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.returncode).name}"
        return f"rank {self.rank} failed with exit status {self.returncode}"


def run(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], write: Write) -> Failure | None:
    """Run one command per rank until all have ended or one has failed, then kill the others.

    Children that ranks leave behind end with the namespaces of the cluster.

    Args:
        commands: command and environment of each rank.
        write: called for each line of output, by one thread at a time.

    Returns:
        The first failure, or None.

    Raises:
        OSError: the program does not exist.
    """
    lock = threading.Lock()

    def forward(rank: int, descriptor: int, pipe: IO[bytes]) -> None:
        for line in pipe:
            with lock:
                write(rank, descriptor, line.removesuffix(b"\n"))

    readers: list[tuple[threading.Thread, Any]] = []
    running, failure = {}, None
    for rank, (command, environment) in enumerate(commands):
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher
        )
        running[process.pid] = rank, process
        for descriptor, pipe in ((STDOUT, process.stdout), (STDERR, process.stderr)):
            reader = threading.Thread(target=forward, args=(rank, descriptor, pipe), daemon=True)
            reader.start()
            readers.append((reader, pipe))
    while running and failure is None:
        ended, status = os.wait()  # reaps orphans too, as the first process of a PID namespace must
        if ended in running:
            rank, process = running.pop(ended)
            process.returncode = os.waitstatus_to_exitcode(status)
            failure = Failure(rank, process.returncode) if process.returncode else None
    for number in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(number, signal.SIGKILL)
    for reader, pipe in readers:
        # Read a rank's output to its end, but only briefly if an orphan, which may write forever, holds the pipe.
        reader.join(None if failure is None and _is_closed(pipe) else _DRAIN_SECONDS)
    return failure


def _is_closed(pipe: IO[bytes]) -> bool:
    """Return whether no process holds the write end of a pipe open."""
    poll = select.poll()
    poll.register(pipe, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))
