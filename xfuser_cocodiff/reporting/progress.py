"""How far a long command is, and about how long it still takes."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TextIO

MINUTE, HOUR = 60, 3600
_FIRST_REST, _LONGEST_REST, _GROWTH = 2.0, 30.0, 1.5
"""Seconds between two lines where each stays: often at first, when one wants to know whether to wait."""


@dataclass
class _Kind:
    """Pieces of work that take about as long as each other."""

    left: float
    """Pieces."""
    expected_seconds: float
    """Of one, before any was done."""
    done: float = 0.0
    seconds: float = 0.0
    """Of all that were done."""


class Progress:
    """Work that is foreseen, and what of it is done.

    What a piece takes is known from those of its kind that are done; before the first of a kind, it is what was
    expected of it, corrected by how the other kinds turned out.

    Args:
        foreseen: for each kind how many pieces there are, and the seconds that one is expected to take; 0 where nothing
            is known of them before one is done.
        is_relative: whether these are not seconds, but only as the kinds are to each other.
        clock: seconds.
    """

    def __init__(
        self,
        foreseen: Mapping[str, tuple[float, float]],
        is_relative: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kinds = {name: _Kind(*kind) for name, kind in foreseen.items()}
        self._is_relative = is_relative
        self._clock = clock
        self._last = clock()

    def advance(self, kind: str, pieces: float = 1.0) -> None:
        """Some pieces are done: what has passed since the last ones was theirs."""
        now, one = self._clock(), self._kinds[kind]
        one.seconds += now - self._last
        one.done += pieces
        one.left = max(0.0, one.left - pieces)
        self._last = now

    def expect(self, kind: str, left: float) -> None:
        """So many pieces of a kind are left, as is known by now."""
        self._kinds[kind].left = left

    @property
    def left_seconds(self) -> float | None:
        """What is left, about; None where that cannot be told yet."""
        known = [kind for kind in self._kinds.values() if kind.done and kind.expected_seconds]
        if not known and self._is_relative:
            return None
        expected = sum(kind.done * kind.expected_seconds for kind in known)
        correction = sum(kind.seconds for kind in known) / expected if known else 1.0
        whole = sum(
            kind.left * (kind.seconds / kind.done if kind.done else kind.expected_seconds * correction)
            for kind in self._kinds.values()
        )
        return max(0.0, whole - (self._clock() - self._last))

    def __str__(self) -> str:
        seconds = self.left_seconds
        return "" if seconds is None else f"{duration(seconds)} left"


def duration(seconds: float) -> str:
    """A time to wait, as one says it."""
    if seconds < MINUTE:
        return f"about {max(5, 5 * round(seconds / 5))} s"
    if seconds < HOUR:
        return f"about {round(seconds / MINUTE)} min"
    hours, rest = divmod(round(seconds / MINUTE), 60)
    return f"about {hours} h {rest} min"


class Line:
    """Where a command says what it does: one line that changes on a terminal, elsewhere a line now and then.

    Args:
        output: where to; None for nobody.
        clock: seconds.
    """

    def __init__(self, output: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._output, self._clock = output, clock
        self._rest, self._next, self._width = _FIRST_REST, 0.0, 0

    def show(self, text: str, at_once: bool = False) -> None:
        """Show a text; elsewhere than on a terminal only if it is to be seen at once, or nothing was for a while."""
        if self._output is None:
            return
        if self._output.isatty():
            self._output.write("\r" + text.ljust(self._width))
            self._width = len(text)
        elif at_once or self._clock() >= self._next:
            self._output.write(f"{text}\n")
            self._next = self._clock() + self._rest
            self._rest = min(self._rest * _GROWTH, _LONGEST_REST)
        self._output.flush()

    def end(self) -> None:
        """Leave the terminal to others."""
        if self._output and self._width:
            self._output.write("\r" + " " * self._width + "\r")
            self._width = 0


class Teller:
    """Tells what a measurement does, and how far it is.

    Args:
        output: where to; None for nobody, as on all ranks but the first.
        clock: seconds.
    """

    def __init__(self, output: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._line, self._clock = Line(output, clock), clock
        self._progress = Progress({}, is_relative=True)
        self._kind = self._what = ""

    def foresee(self, foreseen: Mapping[str, tuple[float, float]], is_relative: bool = False) -> None:
        """Say from here on what is left of some work; see :class:`Progress`."""
        self._progress = Progress(foreseen, is_relative, self._clock)

    def begin(self, kind: str, what: str) -> None:
        """Go on with pieces of a kind, and say what they are."""
        self._kind = kind
        self.say(what)

    def say(self, what: str) -> None:
        """Say what is done from here on."""
        self._what = what
        self._show(at_once=True)

    def advance(self) -> None:
        """A piece is done."""
        self._progress.advance(self._kind)
        self._show()

    def expect(self, left: float) -> None:
        """So many pieces of the kind are left."""
        self._progress.expect(self._kind, left)

    def end(self) -> None:
        """Leave the terminal to others."""
        self._line.end()

    def _show(self, at_once: bool = False) -> None:
        self._line.show(", ".join(filter(None, (self._what, str(self._progress)))), at_once)
