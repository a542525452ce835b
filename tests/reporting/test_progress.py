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


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "about 5 s"), (42, "about 40 s"), (150, "about 2 min"), (3600, "about 1 h 0 min"), (9000, "about 2 h 30 min")],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_terminal_has_one_line() -> None:
    output, clock = Terminal(), Clock()
    told = Teller(output, clock)
    told.say("loading")
    clock.now += 1000  # which is none of the work
    told.expect(10)
    clock.now += 20
    told.advance(2)
    told.end()
    assert output.getvalue().split("\r\x1b[K") == ["", "loading", "loading, about 1 min left", ""]


@pytest.mark.parametrize("steps", [4, 0])
def test_launches_of_a_comparison(tmp_path: Path, steps: int) -> None:
    """Two launches of two runs of four steps, also where nobody foresaw how many: a start takes 10 seconds, as long as
    the 5 steps that it counts as."""
    output, clock = io.StringIO(), Clock()
    launches = Launches(tmp_path, Console(file=output), number=2, runs=2, steps=steps, clock=clock)
    for name in ("stock", "exact"):
        launches.begin()
        clock.now += 10
        for run in (1, 2):
            for step in (1, 2, 3, 4):
                clock.now += 2
                launches.stands(name, run, step, 4)
    assert output.getvalue().splitlines() == [
        "stock: run 1, step 1 of 4, about 40 s left",  # 7 steps here, a start, and 8 more
        "stock: run 2, step 1 of 4, about 30 s left",
        "exact: run 1, step 1 of 4, about 15 s left",
        "exact: run 2, step 1 of 4, about 5 s left",
    ]
