"""Stages: a line after every fact, whatever fails, and nothing measured twice."""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from xfuser_cocodiff.lab.one_gpu import fact_process, mps, rank_launch, runner
from xfuser_cocodiff.lab.one_gpu.fact import Fact, NotAvailableError, Result, Setting
from xfuser_cocodiff.lab.one_gpu.stages import STAGES

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/one_gpu_facts.md"


def fails(_: Setting) -> Result:
    raise ArithmeticError("1 / 0")


def is_missing(_: Setting) -> Result:
    raise NotAvailableError("no device")


FACTS = [
    Fact("broken", fails, 60),
    Fact("missing", is_missing, 60),
    Fact("known", lambda _: {"value": 1.5}, 60),
]


def run(folder: Path, facts: list[Fact] = FACTS, limit: float = 60) -> tuple[list[str], list[Result]]:
    """Run a stage and return the names of failed facts and the lines so far."""
    failed = runner.run_stage("A", facts, folder, lambda fact, seconds: fact_process.outcome_of(fact, None), limit)
    return failed, [json.loads(line) for line in (folder / runner.FACTS_FILE).read_text().splitlines()]


def test_a_fact_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    failed, lines = run(tmp_path)
    assert failed == ["broken"]
    assert [(line["fact"], line["status"]) for line in lines] == [
        ("broken", "failed"),
        ("missing", "not available"),
        ("known", "ok"),
    ]
    assert [lines[0]["reason"], lines[1]["reason"]] == ["ArithmeticError: 1 / 0", "no device"]
    assert lines[2]["result"] == {"value": 1.5}
    assert all(line["seconds"] >= 0 and line["stage"] == "A" for line in lines)
    with tarfile.open(tmp_path / "stage-A.tar.gz") as archive:
        assert archive.getnames() == [runner.FACTS_FILE]


def test_a_second_call_measures_what_is_not_known_yet(tmp_path: Path) -> None:
    run(tmp_path)
    _, lines = run(tmp_path)
    assert [line["fact"] for line in lines[3:]] == ["broken", "missing"]


def test_a_line_that_was_cut_short_is_measured_again(tmp_path: Path) -> None:
    (tmp_path / runner.FACTS_FILE).write_text('{"fact": "known", "sta')
    runner.run_stage("A", FACTS[2:], tmp_path, lambda fact, seconds: {"status": "ok", "result": {}})
    assert runner.known_facts(tmp_path)["known"]["status"] == "ok"


def test_facts_without_time_are_left_to_the_next_call(tmp_path: Path) -> None:
    failed, lines = run(tmp_path, FACTS[2:], limit=1)
    assert (failed, lines[0]["status"]) == (["known"], "out of time")
    failed, lines = run(tmp_path, FACTS[2:])
    assert (failed, lines[1]["status"]) == ([], "ok")


def test_the_time_limit_of_a_fact_is_what_the_stage_has_left(tmp_path: Path) -> None:
    limits = []
    facts = [Fact("short", fails, 7), Fact("long", fails, 1000)]
    runner.run_stage("A", facts, tmp_path, lambda fact, seconds: limits.append(seconds) or {"status": "ok"}, 100)
    assert limits[0] == 7
    assert 90 < limits[1] <= 100


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os; os.write(1, b'illegal address\\n'); os._exit(9)", "exit status 9: illegal address"),
        ("import time; print('begun', flush=True); time.sleep(99)", "took longer than 1 s: begun"),
    ],
)
def test_commands_that_crash_or_hang_are_failures(program: str, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        fact_process.run_command([sys.executable, "-c", program], 1)


def test_all_facts_of_a_stage_fit_into_it() -> None:
    """Each limit allows for a slow device; the stage's own ends the last ones."""
    for facts in STAGES.values():
        assert max(fact.seconds for fact in facts) < runner.STAGE_SECONDS
    names = [fact.name for facts in STAGES.values() for fact in facts]
    assert len(set(names)) == len(names)


def test_the_page_says_what_each_fact_decides() -> None:
    rows = [line.split("|")[1].strip(" `") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert rows == [fact.name for facts in STAGES.values() for fact in facts]


STAND_IN = """#!/usr/bin/env bash
[ "$1" != -c ] || exit 0
printf '%s\\n' "$@" > "$LOG"
env > "$LOG.env"
exit 7
"""


def test_the_script_runs_a_stage_on_the_first_visible_gpu(tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    environment = {"VIRTUAL_ENV": str(tmp_path / "venv"), "LOG": str(tmp_path / "log"), "PATH": "/usr/bin:/bin"}
    command = [str(ROOT / "scripts/one_gpu.sh"), "results", "B"]
    done = subprocess.run(command, cwd=tmp_path, env={**environment, "CUDA_VISIBLE_DEVICES": "3,4"})
    assert done.returncode == 7
    called = (tmp_path / "log").read_text().split()
    assert called == ["-m", "xfuser_cocodiff.lab.one_gpu", str(tmp_path / "results"), "B"]
    assert "CUDA_VISIBLE_DEVICES=3\n" in (tmp_path / "log.env").read_text()
    assert subprocess.run(command[:2], cwd=tmp_path, env=environment, capture_output=True).returncode == 2


@pytest.mark.slow  # the dry run of all facts has no processes of its own
def test_facts_run_in_processes_of_their_own(tmp_path: Path) -> None:
    known = [{"fact": name, "stage": "C", "status": "ok", "result": {}} for name in ("layers", "compiled")]
    (tmp_path / runner.FACTS_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in known))
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "xfuser_cocodiff.lab.one_gpu", str(tmp_path), "C", "--dry-run"]
    fact_process.run_command(command, 500, environment)
    assert {name: line["status"] for name, line in runner.known_facts(tmp_path).items()} == {
        "layers": "ok",
        "compiled": "ok",
        "host_waits": "not available",
        "host_bound": "ok",
    }
    with tarfile.open(tmp_path / "stage-C.tar.gz") as archive:
        assert {"facts.jsonl", "host_bound.log"} <= {*archive.getnames()}


def test_ranks_end_with_the_fact_that_started_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fact that takes too long is killed with its process group; ranks outside of it would keep the GPU."""
    python = tmp_path / "python"
    python.write_text(f"#!/usr/bin/env bash\ncut -d ' ' -f 5 /proc/$$/stat >> {tmp_path}/groups\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(rank_launch.sys, "executable", str(python))
    with pytest.raises(RuntimeError, match="took longer than 2 s"):
        rank_launch.launch("transport", 2, {}, rank_launch.dry_transport(), 2)
    assert (tmp_path / "groups").read_text().split() == [str(os.getpgid(0))] * 2


CONTROL = """#!/usr/bin/env bash
echo "$* $(cat)" >> {log}
[ "$1" != -d ] || sleep {seconds}
"""
KILLED = """
import os, signal
from xfuser_cocodiff.lab.one_gpu import mps
with mps.service(True):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def mps_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Path]:
    """Return a function that installs a stand-in of MPS, which takes some time to start, and returns its log."""

    def install(seconds: float) -> Path:
        program, log = tmp_path / "bin" / mps.CONTROL, tmp_path / "log"
        program.parent.mkdir()
        program.write_text(CONTROL.format(log=log, seconds=seconds))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        monkeypatch.setattr(mps.tempfile, "tempdir", str(tmp_path))
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        return log

    return install


def test_mps_ends_with_a_killed_fact(tmp_path: Path, mps_control: Callable[[float], Path]) -> None:
    """It is a daemon, which would keep the GPU from the next fact."""
    log = mps_control(0)
    with pytest.raises(RuntimeError, match="exit status -9"):
        fact_process.run_command([sys.executable, "-c", KILLED], 600)
    assert [line.split() for line in log.read_text().splitlines()] == [["-d"], ["quit"]]
    assert not [*tmp_path.glob("cocodiff-mps-*")]


def test_mps_that_does_not_start_is_an_error(
    tmp_path: Path, mps_control: Callable[[float], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks then run without it."""
    mps_control(5)
    monkeypatch.setattr(mps, "_SECONDS", 0.5)
    with pytest.raises(RuntimeError, match=r"MPS does not start: .* timed out"), mps.service(True):
        pass
    assert not [*tmp_path.glob("cocodiff-mps-*")]
