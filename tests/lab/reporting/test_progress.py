"""ProgressReporter: estimates and lines, by a clock that the test advances."""

import io

import pytest

from xfuser_cocodiff.lab.reporting.progress import ProgressReporter, format_remaining


class ManualClock:
    """A clock whose seconds the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "about 5 s"), (42, "about 40 s"), (150, "about 2 min"), (3600, "about 1 h 0 min"), (9000, "about 2 h 30 min")],
)
def test_remaining_time_is_rounded(seconds: float, text: str) -> None:
    assert format_remaining(seconds) == text


def test_log_gets_a_line_per_new_activity() -> None:
    output = io.StringIO()
    progress = ProgressReporter(output)
    progress.report("loading")
    progress.report("still loading", is_new=False)
    progress.close()
    assert output.getvalue() == "loading\n"


def test_terminal_line_is_rewritten_and_cleared() -> None:
    output, clock = Terminal(), ManualClock()
    progress = ProgressReporter(output, clock)
    progress.report("loading")
    clock.now += 1000  # before the first work item, so it does not count in the estimate
    progress.set_total(10)
    clock.now += 10
    progress.advance()
    progress.close()
    assert output.getvalue().split("\r\x1b[K") == ["", "loading", "loading, about 2 min left", ""]
