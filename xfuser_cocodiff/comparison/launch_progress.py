"""How far the launches of a comparison are, and about how long they still take."""

import time
from collections.abc import Callable

from xfuser_cocodiff.reporting.progress import Line, Progress

_START, _STEP = "start", "step"
_USUAL_STEPS = 28
"""Of a run, until one has said."""


class LaunchProgress:
    """LaunchProgress that start, and then make runs of steps.

    Args:
        line: where to say so.
        launches: of all sides together.
        runs: of each launch.
        steps: of each run; None where that is not known.
        clock: seconds.
    """

    def __init__(
        self,
        line: Line,
        launches: int,
        runs: int,
        steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.line, self._launches, self._runs = line, launches, runs
        self._steps = steps or _USUAL_STEPS
        pieces = {_START: (launches, 0.0), _STEP: (launches * runs * self._steps, 1.0)}
        self._progress = Progress(pieces, is_relative=True, clock=clock)
        self._name = ""
        self._done: int | None = None
        """Steps of the launch that is under way; None while it starts."""
        self._shown = 0
        """The run that was told of."""

    def begin(self, name: str) -> None:
        """A launch begins."""
        self._launches -= 1
        self._done, self._shown, self._name = None, 0, name
        self.line.show(f"{name}: starting")

    def stands(self, run: int, step: int, steps: int | None) -> None:
        """The launch that is under way has made a step of a run, which has so many."""
        self._steps = steps or self._steps
        done = (run - 1) * self._steps + step
        if self._done is None:
            self._progress.advance(_START)  # with a first step, which takes longer than others
        elif done > self._done:
            self._progress.advance(_STEP, done - self._done)
        self._done = done
        self._expect(self._runs * self._steps - done)
        text = f"{self._name}: run {run}, step {step} of {steps or '?'}"
        self.line.show(", ".join(filter(None, (text, str(self._progress)))), at_once=run > self._shown)
        self._shown = run

    def end(self) -> None:
        """The launch that was under way is over."""
        self._expect(0)
        self.line.end()

    def _expect(self, steps: int) -> None:
        """Of the launch that is under way there are so many steps left."""
        self._progress.expect(_STEP, max(0, steps) + self._launches * self._runs * self._steps)
