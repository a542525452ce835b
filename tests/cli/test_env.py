"""`cocodiff env`: versions, topology and what is missing."""

import json
import re
from pathlib import Path

import pytest

from xfuser_cocodiff import cli
from xfuser_cocodiff.engine.compression import codec_check
from xfuser_cocodiff.tools.reporting import environment
from xfuser_cocodiff.xdit.integration import activation


def test_env_shows_versions_topology_and_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    assert cli.main(["env", "--ranks", "12", "--json", str(tmp_path / "env.json")]) == 0
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
