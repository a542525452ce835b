"""scripts/one_gpu.sh with stand-ins for its commands, and without a GPU."""

import argparse
import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from xfuser import xFuserArgs
from xfuser.config import FlexibleArgumentParser

from xfuser_cocodiff import cli
from xfuser_cocodiff.cli import bench, compare, env, models
from xfuser_cocodiff.engine.topology import launcher

SCRIPT = Path(__file__).parent.parent.parent / "scripts/one_gpu.sh"
PARTS = ["environment", "tests", "kernels", "models", "degree-2", "degree-4", "coded"]
STAND_IN = """#!/usr/bin/env bash
case "$*" in
    *accelerator*) exit "${HAS_NO_GPU:-0}" ;;
    -c*|--version|"-m pip"*) exit ;;
esac
printf '%q ' "$(basename "$0")" "$@" >> "$LOG"
echo >> "$LOG"
env > "$LOG.$1"
[ "$1 $2" != "$FAILS" ]
"""


def launch(folder: Path, *parts: str, **environment: str) -> tuple[subprocess.CompletedProcess, list[list[str]]]:
    """Run the script with stand-ins for Python and cocodiff, and return its outcome and their calls."""
    bin, log = folder / "venv/bin", folder / "log"
    bin.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    for name in ("python", "cocodiff"):
        (bin / name).write_text(STAND_IN)
        (bin / name).chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    variables = {**inherited, "VIRTUAL_ENV": str(bin.parent), "LOG": str(log), "FAILS": "", **environment}
    done = subprocess.run([SCRIPT, folder / "out", *parts], env=variables, capture_output=True, text=True)
    return done, [shlex.split(line) for line in log.read_text().splitlines()]


def test_every_part_runs_and_writes_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, commands = launch(tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(file.stem for file in (tmp_path / "out").glob("*.txt")) == sorted(PARTS)
    calls = [command[1:] for command in commands if command[0] == "cocodiff"]
    assert [command[0] for command in calls] == ["env", "bench", "models", "compare", "compare", "compare"]
    for module, name in ((env, "run"), (bench, "_kernels"), (models, "run"), (compare, "run")):
        monkeypatch.setattr(module, name, check_arguments)
    assert [cli.main(command) for command in calls] == [0] * len(calls)


def check_arguments(options: argparse.Namespace) -> int:
    """Replace a subcommand: check that xDiT accepts its own arguments."""
    if options.xdit_arguments:
        parser = xFuserArgs.add_runner_args(FlexibleArgumentParser())
        config = xFuserArgs.from_cli_args(parser.parse_args([*options.xdit_arguments, "--use_cocodiff"]))
        assert config.ulysses_degree in (2, 4)
    return 0


@pytest.mark.parametrize("visible", [None, "1,2"])
def test_ranks_share_one_device(tmp_path: Path, visible: str | None) -> None:
    done, _ = launch(tmp_path, **({"CUDA_VISIBLE_DEVICES": visible} if visible else {}))
    assert done.returncode == 0
    variables = dict(line.split("=", 1) for line in (tmp_path / "log.compare").read_text().splitlines() if "=" in line)
    assert variables["CUDA_VISIBLE_DEVICES"] == (visible or "0")[0]
    assert launcher.shares_device({**variables, "LOCAL_WORLD_SIZE": "2"}, [], 1)


def test_failed_part_does_not_stop_the_others(tmp_path: Path) -> None:
    done, commands = launch(tmp_path, FAILS="bench kernels")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "Failed: kernels"
    assert len(commands) == len(PARTS)


def test_parts_are_selected_and_resumed(tmp_path: Path) -> None:
    """A machine may be lent for minutes: what has succeeded is not run again."""
    done, commands = launch(tmp_path, "models", "kernels", FAILS="bench kernels")
    assert (done.returncode, [command[1] for command in commands]) == (1, ["bench", "models"])
    done, commands = launch(tmp_path, "models", "kernels")
    assert (done.returncode, [command[1] for command in commands]) == (0, ["bench"])
    lines = [json.loads(line) for line in (tmp_path / "out/parts.jsonl").read_text().splitlines()]
    assert [(line["part"], line["status"]) for line in lines] == [("kernels", 1), ("models", 0), ("kernels", 0)]


def test_missing_gpu_is_an_error(tmp_path: Path) -> None:
    done, commands = launch(tmp_path, HAS_NO_GPU="1")
    assert (done.returncode, commands) == (2, [])
    assert "PyTorch finds no GPU" in done.stderr
