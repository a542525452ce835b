"""Processes of an emulated cluster: a command once per rank, and their output line by line."""

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
_REST_SECONDS = 1.0
"""For which output is awaited that a process holds open which its rank has left behind."""

Write = Callable[[int, int, bytes], None]
"""What is called with rank, `STDOUT` or `STDERR`, and a line, as lines come."""


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


def run(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], write: Write) -> Failure | None:
    """Run a command for each rank until all have ended or one has failed, which ends the others.

    What ranks leave behind ends with the namespaces of the cluster.

    Args:
        commands: of each rank, with its environment.
        write: called as lines come, by one thread at a time.

    Returns:
        The first failure.

    Raises:
        OSError: there is no such program.
    """
    lock = threading.Lock()

    def pass_on(rank: int, descriptor: int, pipe: IO[bytes]) -> None:
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
            reader = threading.Thread(target=pass_on, args=(rank, descriptor, pipe), daemon=True)
            reader.start()
            readers.append((reader, pipe))
    while running and failure is None:
        ended, status = os.wait()  # for what ranks have left behind too, as a first process must
        if ended in running:
            rank, process = running.pop(ended)
            process.returncode = os.waitstatus_to_exitcode(status)
            failure = Failure(rank, process.returncode) if process.returncode else None
    for number in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(number, signal.SIGKILL)
    for reader, pipe in readers:
        # What a rank has said may take its time to be written; what it has left behind may say more for ever.
        reader.join(None if failure is None and _is_closed(pipe) else _REST_SECONDS)
    return failure


def _is_closed(pipe: IO[bytes]) -> bool:
    """Return whether no process holds the other end of a pipe open."""
    poll = select.poll()
    poll.register(pipe, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))
