"""Subcommands of `cocodiff`; `compare`, `tune` and `quality` have files of their own."""

import argparse
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests import ranks
from xfuser_cocodiff import cli
from xfuser_cocodiff.cli import on_ranks
from xfuser_cocodiff.engine.comm import failure_detection
from xfuser_cocodiff.engine.compression import codec_check
from xfuser_cocodiff.tools.launching import rank_group
from xfuser_cocodiff.tools.reporting import environment
from xfuser_cocodiff.xdit.integration import activation


def test_env_shows_versions_topology_and_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    assert cli.main(["env", "--degree", "12", "--json", str(tmp_path / "env.json")]) == 0
    printed = dict(re.split(r" {2,}", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    record = json.loads((tmp_path / "env.json").read_text())
    assert (printed["plugin"], printed["collectives"]) == ("installed", "gloo")
    assert printed["xfuser"].startswith("0.7.")
    assert printed["topology"] == "node=2,gpu=6 (for Ulysses degree 12, 6 ranks a node)"
    assert "finds no GPU" in printed["device"]
    assert "encode and decode ran" in printed["kernels"]
    assert printed.items() >= record["device"].items()
    assert [row["symbol"] for row in record["patches"]] == [row.name for row in activation.patch_set().patches]
    assert (record["schema"], record["topology"], record["ranks_per_node"]) == (1, "node=2,gpu=6", 6)
    assert {row["state"] for row in record["patches"]} <= {"applied", "ready", "used"}


def test_env_shows_why_the_plugin_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation, "_installed", None)
    monkeypatch.setattr(activation, "xdit_version", lambda: "0.9.1")
    assert cli.main(["env"]) == 1
    assert "xfuser 0.9.1 is not supported" in capsys.readouterr().out


def test_env_says_that_kernels_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_check, "failure", lambda *_: "no ptxas")
    assert environment.describe()["device"]["kernels"].endswith(
        "no ptxas; runs use PyTorch's kernels, which are slower"
    )


def warnings_on(rank: int) -> list[str]:
    """Return the warnings that a library gives on a rank during work."""

    def work(*_: object) -> dict:
        warnings.warn("this is deprecated", FutureWarning, stacklevel=1)
        return {}

    options = argparse.Namespace(topology=None, timeout=None, json=None)
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(dist, "destroy_process_group"):
        warnings.simplefilter("always")
        with mock.patch.object(rank_group, "start", lambda *_: dist.group.WORLD):
            assert on_ranks.run(options, work, lambda record: None) == 0
    return [str(one.message) for one in caught if "this is deprecated" in str(one.message)]


def test_warnings_of_libraries_are_shown_by_one_rank() -> None:
    assert ranks.run(warnings_on, 3) == [["this is deprecated"], [], []]


def test_failed_rank_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def work(*_: object) -> dict:
        with failure_detection.report_failed_ranks([], "probe"):
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")

    monkeypatch.setattr(rank_group, "start", lambda *_: None)
    monkeypatch.setattr(failure_detection, "_describe_failure", lambda group, what, failure: f"{what}: rank 1 failed")
    options = argparse.Namespace(topology=None, timeout=None, json=None)
    assert on_ranks.run(options, work, print) == on_ranks.FAILED_RANK_STATUS
    assert capsys.readouterr().err == "cocodiff: communication along 'probe': rank 1 failed\n"


@pytest.mark.slow
def test_only_the_first_rank_prints() -> None:
    """Import messages of transformers and xDiT are turned off."""
    noisy = ("LOG_LEVEL", "TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY")
    usual = {name: value for name, value in os.environ.items() if name not in noisy}
    usual |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks.free_port())}
    program = [sys.executable, "-m", "xfuser_cocodiff.cli", "probe"]
    started = [
        subprocess.Popen(
            program,
            env={**usual, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = (process.communicate(timeout=ranks.SLOW_TIMEOUT)[0] for process in started)
    assert first.startswith("inferred topology")
    assert second == ""
