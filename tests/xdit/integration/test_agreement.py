"""Agreement over the rendezvous store, with two ranks in turn in one process."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import ranks
from xfuser_cocodiff.xdit.integration import agreement


def test_reports_of_an_earlier_attempt_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart by torchrun keeps the store."""
    store = dist.HashStore()
    monkeypatch.setattr(agreement, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def report(rank: int, attempt: int) -> list[dict]:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        return agreement._gather_reports({"rank": rank, "attempt": attempt}, timedelta(milliseconds=50))

    with pytest.raises(RuntimeError, match=r"ranks \[0\]"):
        report(1, attempt=0)
    with pytest.raises(RuntimeError, match=r"ranks \[1\]"):
        report(0, attempt=1)
    assert report(1, attempt=1) == [{"rank": rank, "attempt": 1} for rank in (0, 1)]


def _agree_in_a_second_job(rank: int, file: str) -> list[dict]:
    """Agree in a group of two ranks, of which one has agreed in a group of its own before."""
    agreement.TIMEOUT = timedelta(seconds=30)
    dist.barrier()  # rank 1 may still be connecting
    dist.destroy_process_group()
    if rank == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        agreement.gather_proposals(lambda: {"alone": True})
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    return [agreement.gather_proposals(lambda: {"rank": rank, "number": number}) for number in range(2)]  # noqa: B023


def test_a_process_that_outlives_a_store_agrees_in_the_next(tmp_path: Path) -> None:
    expected = [[{"rank": rank, "number": number} for rank in range(2)] for number in range(2)]
    assert ranks.run(_agree_in_a_second_job, 2, str(tmp_path / "store")) == [expected] * 2
