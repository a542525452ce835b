"""The timeout of ranks that hang: they are killed, and reported with their stacks."""

import time
from pathlib import Path

import pytest

from tests import ranks


def hang(rank: int, hanging: Path, fails: bool) -> None:
    """Hang on rank 1; rank 0 then fails or returns."""
    if rank == 1:
        hanging.touch()
        time.sleep(ranks.SLOW_TIMEOUT)
    while not hanging.exists():
        time.sleep(0.01)
    if fails:
        raise ValueError("rank 0 fails")


def test_rank_that_hangs_after_a_failure_reports_its_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE", 0.5)
    with pytest.raises(AssertionError, match="ValueError: rank 0 fails") as raised:
        ranks.run(hang, 2, tmp_path / "hanging", True)
    assert " in hang\n" in str(raised.value).split("rank 1: still running, in")[1]


def test_ranks_that_wait_for_a_hanging_rank_report_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT", 1)
    with pytest.raises(AssertionError, match="2 of 2 ranks were still running after 1 s") as raised:
        ranks.outcomes(hang, 2, tmp_path / "hanging", False)
    waiting, hanging = str(raised.value).split("rank 1: still running, in")
    assert " in barrier\n" in waiting and " in hang\n" in hanging


def compute(rank: int) -> str:
    end = time.process_time() + 1.5
    while time.process_time() < end:
        pass
    return "computed"


def test_ranks_that_compute_are_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT", 0.5)
    assert ranks.run(compute, 1) == ["computed"]
