"""How far long commands say they are: arithmetic on a clock that stands still unless it is told."""

import io

import pytest

from xfuser_cocodiff.comparison.launch_progress import LaunchProgress
from xfuser_cocodiff.reporting.progress import Line, Progress, Teller, duration


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_what_was_expected_counts_until_something_is_known(clock: Clock) -> None:
    progress = Progress({"small": (10, 1.0), "large": (4, 5.0)}, clock=clock)
    assert progress.left_seconds == 10 * 1 + 4 * 5
    clock.now += 3  # a small piece took three times as long, and so will the large ones
    progress.advance("small")
    assert progress.left_seconds == 9 * 3 + 4 * 15
    clock.now += 40  # four large ones took twice as long: that is what is known of them now
    progress.advance("large", 2)
    assert progress.left_seconds == 9 * 3 + 2 * 20
    progress.expect("small", 1)
    assert progress.left_seconds == 1 * 3 + 2 * 20
    clock.now += 2  # of the piece that is under way
    assert progress.left_seconds == 41
    clock.now += 1000
    assert progress.left_seconds == 0


def test_nothing_is_said_of_what_nothing_is_known_of(clock: Clock) -> None:
    progress = Progress({"start": (3, 0.0), "step": (8, 1.0)}, is_relative=True, clock=clock)
    clock.now += 20
    progress.advance("start")
    assert progress.left_seconds is None and str(progress) == ""
    clock.now += 2
    progress.advance("step")
    assert progress.left_seconds == 2 * 20 + 7 * 2
    assert str(progress) == "about 55 s left"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "about 5 s"),
        (42, "about 40 s"),
        (60, "about 1 min"),
        (150, "about 2 min"),
        (3600, "about 1 h 0 min"),
        (9000, "about 2 h 30 min"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_lines_come_often_at_first_and_at_once_when_something_begins(clock: Clock) -> None:
    output = io.StringIO()
    told = Teller(output, clock)
    told.say("probing")
    told.foresee({"a": (100, 1.0)})
    told.begin("a", "first")
    for _ in range(100):
        clock.now += 1
        told.advance()
    lines = output.getvalue().splitlines()
    assert lines[:2] == ["probing", "first, about 2 min left"]
    assert lines[2] == "first, about 2 min left"
    assert lines[-1].startswith("first, about ")
    assert 5 < len(lines) < 20
    told.end()
    assert output.getvalue().splitlines() == lines


def test_a_terminal_has_one_line(clock: Clock) -> None:
    output = Terminal()
    line = Line(output, clock)
    line.show("a long text")
    line.show("short")
    assert output.getvalue() == "\ra long text" + "\rshort      "
    line.end()
    assert output.getvalue().endswith("\r           \r".replace(" " * 11, " " * 5))


def test_other_ranks_say_nothing(clock: Clock) -> None:
    told = Teller(None, clock)
    told.foresee({"a": (1, 1.0)})
    told.begin("a", "first")
    told.advance()
    told.end()


def test_launches_of_a_comparison(clock: Clock) -> None:
    """Two launches of two runs of four steps: a start takes 10 seconds, a step 2."""
    output = io.StringIO()
    launches = LaunchProgress(Line(output, clock), launches=2, runs=2, steps=4, clock=clock)
    for name in ("stock", "exact"):
        launches.begin(name)
        clock.now += 10
        for run in (1, 2):
            for step in (1, 2, 3, 4):
                launches.stands(run, step, 4)
                clock.now += 2
        launches.end()
    assert output.getvalue().splitlines() == [
        "stock: starting",
        "stock: run 1, step 1 of 4",  # and nothing of what is left, since nothing is known
        "stock: run 1, step 3 of 4, about 35 s left",  # 5 steps here, a start, and 8 more
        "stock: run 2, step 1 of 4, about 30 s left",
        "exact: starting",
        "exact: run 1, step 1 of 4, about 15 s left",
        "exact: run 2, step 1 of 4, about 5 s left",
    ]


def test_steps_that_nobody_foresaw(clock: Clock) -> None:
    output = io.StringIO()
    launches = LaunchProgress(Line(output, clock), launches=1, runs=1, steps=None, clock=clock)
    launches.begin("script")
    launches.stands(1, 1, 3)
    clock.now += 30
    launches.stands(1, 2, 3)
    launches.stands(2, 1, 3)  # more than one run, as scripts may make them
    assert output.getvalue().splitlines() == [
        "script: starting",
        "script: run 1, step 1 of 3",
        "script: run 1, step 2 of 3, about 30 s left",
        "script: run 2, step 1 of 3, about 5 s left",
    ]
