"""`cocodiff probe` on real ranks: a documented record with consistent figures."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.engine.topology.test_planner import profile_of
from xfuser_cocodiff import cli
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.probing import link_survey

CPU = torch.device("cpu")
MACHINE = profile_of([2, 3, 2], [1e6, 2e6, 4e6], latency=1e-4, launch=1e-4)


def write(machine: Profile, folder: Path) -> Path:
    file = folder / "profile.json"
    file.write_text(json.dumps({"profile": machine.to_json()}))
    return file


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["probe"], ["RANK", "torchrun"]),
        (["probe", "--topology", "2x2"], ["--topology", "4 ranks"]),
        (["probe", "--timeout", "-1"], ["--timeout", "-1"]),
    ],
)
def test_bad_options_are_reported(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words)


def probe(rank: int) -> dict:
    return link_survey.measure(dist.group.WORLD, None, CPU)


def test_the_planner_reads_the_record_of_probe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = ranks.run(probe, 4)[0]
    file = tmp_path / "probe.json"
    file.write_text(json.dumps(record))
    profile = Profile.read(file)
    assert str(profile.topology) == record["topology"] == record["topology_inferred"]
    assert [axis["name"] for axis in record["axes"]] == [axis.name for axis in profile.topology.axes]
    assert all(axis["bytes_per_second"] > 0 and axis["latency_us"] > 0 for axis in record["axes"])
    bandwidths = record["pairs"]["bytes_per_second"]
    assert [len(row) for row in bandwidths] == [4] * 4
    assert all((value is None) == (i == j) for i, row in enumerate(bandwidths) for j, value in enumerate(row))
    assert 0 < record["profile_seconds"] < record["seconds"]
    link_survey.show(record)
    assert record["topology_inferred"] in capsys.readouterr().out


def test_axes_below_a_tenth_of_codec_throughput_are_slow_and_then_those_below_a_fifth() -> None:
    def slow(codec: float, **sizes: int) -> tuple[str, ...]:
        profile = profile_of([2, 3, 2], [1e6, 2.1e6, 4e6], 0, 0)
        return dataclasses.replace(profile, topology=Topology.named(**sizes), codec_bytes_per_second=codec).slow_axes

    assert slow(10.3e6, node=2, gpu=3, tile=2) == ("node",)
    assert slow(19.9e6, node=2, gpu=3, tile=2) == ("node", "gpu")
    assert slow(20.3e6, node=2, gpu=3, tile=2) == ("node", "gpu", "tile")
    assert slow(9.7e6, node=2, gpu=3, tile=2) == ()
    assert slow(20.3e6, node=1, gpu=3, tile=1) == ()  # the others have nobody to send to
    assert slow(21.3e6, node=1, gpu=3, tile=1) == ("gpu",)
