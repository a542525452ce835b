"""Signals that ask a process to stop, noted when they come and acted on where that does no harm."""

import contextlib
import os
import signal
from typing import Any


class InterruptionError(Exception):
    """The process was asked to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.status = 128 + number
        """Exit status as a shell has it."""


class Interruption:
    """As a context, keeps SIGINT, SIGTERM and SIGHUP from ending the process at a random place.

    Its file descriptor becomes readable when one has come, so that a selector can wait for it.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._number: int | None = None
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        for number in self.SIGNALS:
            self._before[number] = signal.signal(number, lambda number, _: self.note(number))
        # Whoever started us with these blocked had them wait for handlers.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """Descriptor to wait on."""
        return self._read

    def note(self, number: int) -> None:
        """Have the process stop as if this signal had come; the first one counts."""
        self._number = self._number or number
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"!")

    def check(self) -> None:
        """Raise :class:`InterruptionError` if the process was asked to stop."""
        if self._number is not None:
            raise InterruptionError(self._number)
