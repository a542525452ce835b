"""How far long commands say they are: arithmetic on a clock that stands still unless it is told."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from xfuser_cocodiff.comparison.launch import Launches
from xfuser_cocodiff.reporting.progress import Teller, duration


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


def test_what_was_expected_is_corrected_by_what_is_done(clock: Clock) -> None:
    told = Teller(None, clock)
    told.foresee({"small": (10, 1.0), "large": (4, 5.0)})
    assert told.left_seconds == 10 * 1 + 4 * 5
    clock.now += 3  # a small piece took three times as long, and so will the large ones
    told.begin("small", "")
    told.advance()
    assert told.left_seconds == 3 * (9 * 1 + 4 * 5)
    clock.now += 41  # two large ones, twice as long as that
    told.begin("large", "")
    told.advance(2)
    assert told.left_seconds == 4 * (9 * 1 + 2 * 5)
    told.expect(0)
    assert told.left_seconds == 4 * 9
    clock.now += 2  # of the piece that is under way
    assert told.left_seconds == 34
    clock.now += 1000
    assert told.left_seconds == 0


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
    told = Teller(output, clock)
    told.say("a long text")
    told.say("short")
    assert output.getvalue() == "\ra long text" + "\rshort      "
    told.end()
    assert output.getvalue().endswith("\r     \r")


def test_launches_of_a_comparison(clock: Clock, tmp_path: Path) -> None:
    """Two launches of two runs of four steps: a start takes 10 seconds, as long as the 5 steps that it counts as."""
    output = io.StringIO()
    launches = Launches(tmp_path, Console(file=output), number=2, runs=2, steps=4, clock=clock)
    for name in ("stock", "exact"):
        launches.begin(name)
        clock.now += 10
        for run in (1, 2):
            for step in (1, 2, 3, 4):
                clock.now += 2
                launches.stands(name, run, step, 4)
    assert output.getvalue().splitlines() == [
        "stock: starting",
        "stock: run 1, step 1 of 4, about 40 s left",  # 7 steps here, a start, and 8 more
        "stock: run 1, step 3 of 4, about 35 s left",
        "stock: run 2, step 1 of 4, about 30 s left",
        "exact: starting, about 25 s left",
        "exact: run 1, step 1 of 4, about 15 s left",
        "exact: run 2, step 1 of 4, about 5 s left",
    ]


def test_steps_that_nobody_foresaw(clock: Clock, tmp_path: Path) -> None:
    output = io.StringIO()
    launches = Launches(tmp_path, Console(file=output), number=1, runs=1, steps=0, clock=clock)
    launches.begin("script")
    clock.now += 60
    launches.stands("script", 1, 1, 3)
    clock.now += 10
    launches.stands("script", 1, 2, 3)
    launches.stands("script", 2, 1, 3)  # more than one run, as scripts may make them
    assert output.getvalue().splitlines() == [
        "script: starting",
        "script: run 1, step 1 of 3, about 20 s left",
        "script: run 1, step 2 of 3, about 10 s left",
        "script: run 2, step 1 of 3, about 5 s left",
    ]
