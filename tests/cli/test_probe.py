"""`cocodiff probe` on real ranks: a record with consistent figures, which the planner reads."""

import contextlib
import io
import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests import ranks
from xfuser_cocodiff import cli
from xfuser_cocodiff.engine.topology.link_profile import Profile


def probe(rank: int, file: Path) -> str:
    """Return what the command prints on a rank."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # not used: the ranks have a store already
    with contextlib.redirect_stdout(io.StringIO()) as printed, mock.patch.object(dist, "destroy_process_group"):
        assert cli.main(["probe", "--json", str(file)]) == 0
    return printed.getvalue()


def test_ranks_write_one_record_and_only_the_first_prints(tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    first, second = ranks.run(probe, 2, file)
    record, profile = json.loads(file.read_text()), Profile.read(file)
    assert first.startswith(f"inferred topology: {record['topology_inferred']}\n") and second == ""
    assert str(profile.topology) == record["topology"] == record["topology_inferred"]
    assert [axis["name"] for axis in record["axes"]] == [axis.name for axis in profile.topology.axes]
    assert all(axis["bytes_per_second"] > 0 and axis["latency_us"] > 0 for axis in record["axes"])
    bandwidths = record["pairs"]["bytes_per_second"]
    assert [[value is None for value in row] for row in bandwidths] == [[True, False], [False, True]]
    assert 0 < record["profile_seconds"] < record["seconds"]


def test_without_a_launcher_it_says_what_starts_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(["probe"]) == 2
    said = capsys.readouterr().err
    assert "RANK" in said and "torchrun" in said
