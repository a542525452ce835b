"""How far long commands say they are: arithmetic on a clock that stands still unless it is told."""

import io

import pytest

from xfuser_cocodiff.lab.reporting.progress import ProgressReporter, duration


class RunTracker:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "about 5 s"), (42, "about 40 s"), (150, "about 2 min"), (3600, "about 1 h 0 min"), (9000, "about 2 h 30 min")],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_log_has_what_begins() -> None:
    output = io.StringIO()
    told = ProgressReporter(output)
    told.say("loading")
    told.say("loading still", begins=False)
    told.end()
    assert output.getvalue() == "loading\n"


def test_a_terminal_has_one_line() -> None:
    output, clock = Terminal(), RunTracker()
    told = ProgressReporter(output, clock)
    told.say("loading")
    clock.now += 1000  # which is none of the work
    told.expect(10)
    clock.now += 10
    told.advance()
    told.end()
    assert output.getvalue().split("\r\x1b[K") == ["", "loading", "loading, about 2 min left", ""]
