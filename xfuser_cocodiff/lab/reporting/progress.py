"""Reports the progress of a long command and estimates the remaining time."""

import time
from collections.abc import Callable
from typing import TextIO

MINUTE, HOUR = 60, 3600


class ProgressReporter:
    """Progress of a command: one line that is rewritten on a terminal, one line per activity in a log.

    Args:
        output: stream to write to; None writes nothing, as on all ranks but the first.
        clock: returns the current time in seconds.
    """

    def __init__(self, output: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._output, self._clock = output, clock
        self._activity, self._remaining, self._done, self._start = "", 0, 0, 0.0

    def set_total(self, items: int) -> None:
        """Set the number of work items and start the clock for the estimate."""
        self._remaining, self._start = items, self._clock()

    def report(self, activity: str, is_new: bool = True) -> None:
        """Show the current activity; a log gets a line only for a new one."""
        self._activity = activity
        self._show(is_new)

    def advance(self) -> None:
        """Count one work item as done."""
        self._done += 1
        self._remaining = max(0, self._remaining - 1)
        self._show(is_new=False)

    def close(self) -> None:
        """Clear the progress line of a terminal."""
        if self._output and self._output.isatty():
            self._output.write("\r\x1b[K")
            self._output.flush()

    def _show(self, is_new: bool) -> None:
        if self._output is None:
            return
        text = self._activity
        if self._done and self._remaining:
            seconds_per_item = (self._clock() - self._start) / self._done
            text += f", {format_remaining(seconds_per_item * self._remaining)} left"
        if self._output.isatty():
            self._output.write(f"\r\x1b[K{text}")
        elif is_new:
            self._output.write(f"{text}\n")
        self._output.flush()


def format_remaining(seconds: float) -> str:
    """Format an estimated duration, rounded to 5 seconds or to a minute."""
    if seconds < MINUTE:
        return f"about {max(5, 5 * round(seconds / 5))} s"
    if seconds < HOUR:
        return f"about {round(seconds / MINUTE)} min"
    hours, minutes = divmod(round(seconds / MINUTE), 60)
    return f"about {hours} h {minutes} min"
