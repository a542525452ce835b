"""How far a long command is, and about how long it still takes."""

import time
from collections.abc import Callable, Mapping
from typing import TextIO

MINUTE, HOUR = 60, 3600
_FIRST_REST, _LONGEST_REST, _GROWTH = 2.0, 30.0, 1.5
"""Seconds between two lines where each stays: often at first, when one wants to know whether to wait."""


class Teller:
    """Tells what a command does, and about how long it still takes: on a terminal in one line that changes, elsewhere
    in a line now and then, so that a log says it too.

    Args:
        output: where to; None for nobody, as on all ranks but the first.
        clock: seconds.
    """

    def __init__(self, output: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._output, self._clock = output, clock
        self._rest, self._next, self._width = _FIRST_REST, 0.0, 0
        self._what = ""
        self.foresee({}, is_relative=True)

    def foresee(self, foreseen: Mapping[str, tuple[float, float]], is_relative: bool = False) -> None:
        """Say from here on what is left of some work.

        Args:
            foreseen: for each kind of work, in their order, its pieces, and the seconds that one is expected to take.
                All are corrected by how those that are done turned out.
            is_relative: whether these are no seconds, but only as kinds are to each other.
        """
        self._left = {kind: pieces for kind, (pieces, _) in foreseen.items()}
        self._expected = {kind: seconds for kind, (_, seconds) in foreseen.items()}
        self._done = self._seconds = 0.0
        self._kind = next(iter(foreseen), "")
        self._is_relative, self._last = is_relative, self._clock()

    def begin(self, kind: str, what: str) -> None:
        """Go on with pieces of a kind, and say what they are."""
        self._kind = kind
        self.say(what)

    def say(self, what: str) -> None:
        """Say what is done from here on."""
        self._what = what
        self._show(at_once=True)

    def advance(self, pieces: float = 1.0, what: str | None = None, at_once: bool = False) -> None:
        """Count pieces of the kind as done: what has passed since the last ones was theirs.

        Args:
            pieces: how many.
            what: is done from here on, if that is something else.
            at_once: whether to say it elsewhere than on a terminal, too, if something was said a moment ago.
        """
        now = self._clock()
        self._seconds += now - self._last
        self._done += pieces * self._expected[self._kind]
        self._left[self._kind] = max(0.0, self._left[self._kind] - pieces)
        self._last, self._what = now, what or self._what
        self._show(at_once)

    def expect(self, left: float) -> None:
        """Expect so many more pieces of the kind."""
        self._left[self._kind] = left

    @property
    def left_seconds(self) -> float | None:
        """What is left, about; None where that cannot be told yet."""
        if not self._done and self._is_relative:
            return None
        rate = self._seconds / self._done if self._done else 1.0
        whole = rate * sum(left * self._expected[kind] for kind, left in self._left.items())
        return max(0.0, whole - (self._clock() - self._last))

    def end(self) -> None:
        """Leave the terminal to others."""
        if self._output and self._width:
            self._output.write("\r" + " " * self._width + "\r")
            self._width = 0

    def _show(self, at_once: bool) -> None:
        if self._output is None:
            return
        left = self.left_seconds
        text = self._what if left is None else f"{self._what}, {duration(left)} left"
        if self._output.isatty():
            self._output.write("\r" + text.ljust(self._width))
            self._width = len(text)
        elif at_once or self._clock() >= self._next:
            self._output.write(f"{text}\n")
            self._next = self._clock() + self._rest
            self._rest = min(self._rest * _GROWTH, _LONGEST_REST)
        self._output.flush()


def duration(seconds: float) -> str:
    """A time to wait, as one says it."""
    if seconds < MINUTE:
        return f"about {max(5, 5 * round(seconds / 5))} s"
    if seconds < HOUR:
        return f"about {round(seconds / MINUTE)} min"
    hours, rest = divmod(round(seconds / MINUTE), 60)
    return f"about {hours} h {rest} min"
