"""Processes of an emulated cluster: watches the ranks and their output; starts one command per rank."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

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


@dataclass(frozen=True)
class Process:
    """A started rank: a child of this process that leads a session of its own."""

    number: int
    """Process ID."""
    outputs: Mapping[int, IO[bytes]]
    """Read ends of its pipes, by `STDOUT` and `STDERR`."""


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
    started = [
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher
        )
        for command, environment in commands
    ]
    processes = [Process(each.pid, {STDOUT: _pipe(each.stdout), STDERR: _pipe(each.stderr)}) for each in started]
    failure = watch(processes, write)
    for each in started:
        each.returncode = 0  # `watch` has waited for it, so subprocess must not
    return failure


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def watch(processes: Sequence[Process], write: Write) -> Failure | None:
    """Wait until all ranks have ended or one has failed, then kill the others.

    Args:
        processes: the ranks, in order.
        write: called for each line of output, by one thread at a time.

    Returns:
        The first failure, or None.
    """
    lock = threading.Lock()

    def forward(rank: int, descriptor: int, pipe: IO[bytes]) -> None:
        for line in pipe:
            with lock:
                write(rank, descriptor, line.removesuffix(b"\n"))

    readers: list[tuple[threading.Thread, IO[bytes]]] = []
    for rank, process in enumerate(processes):
        for descriptor, pipe in process.outputs.items():
            reader = threading.Thread(target=forward, args=(rank, descriptor, pipe), daemon=True)
            reader.start()
            readers.append((reader, pipe))
    failure = _first_failure({process.number: rank for rank, process in enumerate(processes)})
    for reader, pipe in readers:
        # Read a rank's output to its end, but only briefly if an orphan, which may write forever, holds the pipe.
        reader.join(None if failure is None and _is_closed(pipe) else _DRAIN_SECONDS)
    return failure


def _first_failure(running: dict[int, int]) -> Failure | None:
    """Wait until all ranks have ended or one has failed, then kill the others and wait for them.

    Args:
        running: rank of each process ID.
    """
    failure = None
    while running and failure is None:
        ended, status = os.wait()  # reaps orphans too, as the first process of a PID namespace must
        if ended in running:
            rank, returncode = running.pop(ended), os.waitstatus_to_exitcode(status)
            failure = Failure(rank, returncode) if returncode else None
    for number in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(number, signal.SIGKILL)
        os.kill(number, signal.SIGKILL)  # a forked rank that does not lead its session yet
    for number in running:
        os.waitpid(number, 0)
    return failure


def print_line(rank: int, descriptor: int, line: bytes) -> None:
    """Write a line of a rank to this process's stdout or stderr, prefixed by the rank."""
    output = (sys.stdout if descriptor == STDOUT else sys.stderr).buffer
    try:
        output.write(b"[%d] %s\n" % (rank, line))
        output.flush()
    except BrokenPipeError:
        # The reader has gone, as with `| head`: exit as a process that SIGPIPE killed.
        os._exit(128 + signal.SIGPIPE)


def _is_closed(pipe: IO[bytes]) -> bool:
    """Return whether no process holds the write end of a pipe open."""
    poll = select.poll()
    poll.register(pipe, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))
