"""The runner keeps what is known, whatever a fact does, and its limits keep a command short."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.one_gpu import __main__ as command_line
from benchmarks.one_gpu import runner
from benchmarks.one_gpu.table import COMMANDS, Fact

ROOT = Path(__file__).parents[3]
LONGEST = {"1": 480, "2": 360}
"""Seconds within which each command must end."""
PROGRAM = """
import json, os, subprocess, sys, time
name = sys.argv[-1]
with open("facts.jsonl", "a") as lines:
    lines.write(json.dumps({"fact": name, "rank": os.environ["RANK"], "of": os.environ["WORLD_SIZE"]}) + chr(10))
if name == "crash":
    print("illegal address", flush=True)
    os.abort()
if name == "absent":
    print("ncu is not on PATH", flush=True)
    sys.exit(3)
if name == "hang" or (name == "half" and os.environ["RANK"] == "0"):
    print("begun", flush=True)
    subprocess.run(["sleep", "321"])
if name == "half":
    sys.exit("rank 1 is lost")
if name in ("a", "b"):  # each waits for the other
    open(name, "w").close()
    while not os.path.exists("b" if name == "a" else "a"):
        time.sleep(0.01)
"""


def run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *groups: tuple[Fact, ...]
) -> tuple[list[str], dict[str, runner.Row], list[runner.Row]]:
    """Run facts; return the failed ones, how each has ended, and what the facts wrote."""
    (folder / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(runner, "COMMANDS", {"1": groups})
    failed = runner.run("1", folder, [sys.executable, "program.py"])
    rows = [json.loads(line) for line in (folder / runner.FACTS_FILE).read_text().splitlines()]
    ended = {row["fact"]: row for row in rows if "status" in row}
    return failed, ended, [row for row in rows if "status" not in row]


def test_a_fact_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [(Fact(name, "", 30),) for name in ("crash", "absent", "fine")]
    failed, ended, written = run(monkeypatch, tmp_path, *groups)
    assert failed == ["crash"]
    assert [row["status"] for row in ended.values()] == ["failed", "not available", "ok"]
    assert "illegal address" in ended["crash"]["reason"] and ended["crash"]["exit_status"] < 0
    assert ended["absent"]["reason"] == "ncu is not on PATH"
    assert [row["fact"] for row in written] == ["crash", "absent", "fine"]


def test_a_fact_that_hangs_is_killed_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, ended, _ = run(monkeypatch, tmp_path, (Fact("hang", "", 1),), (Fact("fine", "", 30),))
    assert failed == ["hang"]
    assert (ended["hang"]["status"], ended["hang"]["reason"]) == ("out of time", "begun")
    assert ended["fine"]["status"] == "ok"
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if os.access(file, os.R_OK)]
    assert b"sleep\x00321\x00" not in commands


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.monotonic()
    failed, ended, written = run(monkeypatch, tmp_path, (Fact("half", "", 60, ranks=2),))
    assert time.monotonic() - started < 50
    assert (failed, ended["half"]["rank"], ended["half"]["reason"]) == (["half"], 1, "rank 1 is lost")
    assert {(row["rank"], row["of"]) for row in written} <= {("0", "2"), ("1", "2")}


def test_facts_of_a_group_run_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, _, _ = run(monkeypatch, tmp_path, (Fact("a", "", 30), Fact("b", "", 30)))
    assert failed == []


def test_time_that_a_fact_leaves_is_added_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, ended, _ = run(monkeypatch, tmp_path, (Fact("fine", "", 8),), (Fact("hang", "", 0.01),))
    assert failed == ["hang"]
    assert ended["fine"]["seconds"] + ended["hang"]["seconds"] > 7.9, "however long the first took"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_short(command: str) -> None:
    assert sum(max(fact.seconds for fact in group) for group in COMMANDS[command]) < LONGEST[command]


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(command_line, "MODULES", ("torch", "no_such_module"))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    assert command_line.run(tmp_path / "results", "1", "none") == 2
    assert "missing: no_such_module, xfuser-cocodiff. Nothing is downloaded" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_the_page_explains_each_fact() -> None:
    rows = re.findall(r"^\| `(\w+)`", (ROOT / "docs/one_gpu.md").read_text(), re.MULTILINE)
    assert rows == [fact.name for groups in COMMANDS.values() for group in groups for fact in group]


STAND_IN = '#!/usr/bin/env bash\nprintf "%s\\n" "$@" "$CUDA_VISIBLE_DEVICES" "${PYTHONPATH%%:*}"\nexit 7\n'


@pytest.mark.parametrize(
    ("option", "module"), [([], "benchmarks.one_gpu"), (["--dry-run"], "tests.benchmarks.one_gpu.dry_run")]
)
def test_the_script_calls_python3_with_one_gpu(option: list[str], module: str, tmp_path: Path) -> None:
    """No other Python, no environment and no index."""
    (tmp_path / "python3").write_text(STAND_IN)
    (tmp_path / "python3").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "3,4"}
    command = [ROOT / "scripts/one_gpu.sh", "results", "2", *option]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.split() == ["-m", module, str(tmp_path / "results"), "2", "3", str(ROOT)]
    assert subprocess.run(command[:2], env=environment, capture_output=True).returncode == 2
