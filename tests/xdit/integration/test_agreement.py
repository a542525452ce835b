"""Agreement over the rendezvous store, with two ranks in turn in one process."""

import itertools
from datetime import timedelta

import pytest
import torch.distributed as dist

from xfuser_cocodiff.xdit.integration import agreement


def test_reports_of_an_earlier_attempt_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart by torchrun keeps the store: its ranks count their rounds from 0 again."""
    store = dist.HashStore()
    monkeypatch.setattr(agreement, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def report(rank: int, attempt: int) -> list[dict]:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        monkeypatch.setattr(agreement, "_rounds", itertools.count())
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        return agreement._exchange_reports({"rank": rank, "attempt": attempt}, timedelta(milliseconds=50))

    with pytest.raises(agreement.MissingReportError, match=r"ranks \[0\]"):
        report(1, attempt=0)
    with pytest.raises(agreement.MissingReportError, match=r"ranks \[1\]"):
        report(0, attempt=1)
    assert report(1, attempt=1) == [{"rank": rank, "attempt": 1} for rank in (0, 1)]
