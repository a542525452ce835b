"""The guard of ranks that hang: it ends them, and says which they are and where."""

import time
from pathlib import Path

import pytest

from tests import ranks


def hang(rank: int, hanging: Path, fails: bool) -> None:
    """Hang on rank 1, whereupon rank 0 fails or has nothing more to do."""
    if rank == 1:
        hanging.touch()
        time.sleep(ranks.SLOW_TIMEOUT)
    while not hanging.exists():
        time.sleep(0.01)
    if fails:
        raise ValueError("rank 0 fails")


def test_a_rank_that_hangs_after_another_has_failed_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE", 0.5)
    with pytest.raises(AssertionError, match="ValueError: rank 0 fails") as raised:
        ranks.run(hang, 2, tmp_path / "hanging", True)
    assert " in hang\n" in str(raised.value).split("rank 1: still running, in")[1]


def test_ranks_that_wait_for_one_that_hangs_say_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_ranks_that_compute_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT", 0.5)
    assert ranks.run(compute, 1) == ["computed"]
