"""How far a long command is, and about how long it still takes."""

import time
from collections.abc import Callable
from typing import TextIO

MINUTE, HOUR = 60, 3600


class ProgressReporter:
    """Tells what a command does, and about how long it still takes: on a terminal in one line that changes, elsewhere
    in a line when something begins, so that a log says it too.

    Args:
        output: where to; None for nobody, as on all ranks but the first.
        clock: seconds.
    """

    def __init__(self, output: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._output, self._clock = output, clock
        self._what, self._left, self._done, self._began = "", 0, 0, 0.0

    def expect(self, pieces: int) -> None:
        """Expect so many pieces of work, the first of which begins now."""
        self._left, self._began = pieces, self._clock()

    def say(self, what: str, begins: bool = True) -> None:
        """Say what is done from here on; a log gets a line only where something begins."""
        self._what = what
        self._show(begins)

    def advance(self) -> None:
        """Count a piece as done."""
        self._done += 1
        self._left = max(0, self._left - 1)
        self._show(begins=False)

    def end(self) -> None:
        """Leave the terminal to others."""
        if self._output and self._output.isatty():
            self._output.write("\r\x1b[K")
            self._output.flush()

    def _show(self, begins: bool) -> None:
        if self._output is None:
            return
        text = self._what
        if self._done and self._left:
            text += f", {duration((self._clock() - self._began) / self._done * self._left)} left"
        if self._output.isatty():
            self._output.write(f"\r\x1b[K{text}")
        elif begins:
            self._output.write(f"{text}\n")
        self._output.flush()


def duration(seconds: float) -> str:
    """A time to wait, as one says it."""
    if seconds < MINUTE:
        return f"about {max(5, 5 * round(seconds / 5))} s"
    if seconds < HOUR:
        return f"about {round(seconds / MINUTE)} min"
    hours, rest = divmod(round(seconds / MINUTE), 60)
    return f"about {hours} h {rest} min"
