"""`cocodiff bench all`: its commands are valid, failed ones are reported, finished ones are skipped."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xfuser_cocodiff import cli
from xfuser_cocodiff.lab.bench import suite
from xfuser_cocodiff.lab.bench.suite import BenchRun
from xfuser_cocodiff.lab.cluster_bench import requested_cells, row_names


@pytest.mark.parametrize("run", suite.RUNS, ids=lambda run: run.name)
def test_every_command_parses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: BenchRun) -> None:
    seen = []
    commands = {cli.bench: ("_model", "_a2a", "_kernels"), cli.quality: ("run",), cli.compare: ("run",)}
    commands[cli.bench.bench_cluster] = ("run",)
    for module, names in commands.items():
        for name in names:
            monkeypatch.setattr(module, name, lambda options: seen.append(options) or 0)
    arguments = run.arguments(tmp_path)
    assert cli.main(arguments[arguments.index("xfuser_cocodiff.cli") + 1 :]) == 0
    assert seen[0].json == tmp_path / f"{run.name}.json"
    assert seen[0].xdit_arguments == run.compared.split()


def test_runs_are_listed_and_unknown_names_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "all", "--list", "--only", "kernels,equal"]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["kernels", "equal"]
    assert cli.main(["bench", "all", "--list", "--only", "kernels,color"]) == 2
    assert "--only 'color' is not valid; valid are speed, first-1, " in capsys.readouterr().err


def test_runs_are_selected_by_the_part_before_a_dash() -> None:
    names = [run.name for run in suite.select("cluster,kernels")]
    assert names[:4] == [f"cluster-aurora-{model}" for model in ("sd35", "flux1", "qwen-image", "flux2")]
    assert names[-1] == "kernels" and all(name.startswith("cluster-") for name in names[:-1])
    frontier = [run.name for run in suite.select("frontier")]
    assert frontier[:2] == ["frontier", "frontier-FLUX.1-dev-50"] and frontier[-1] == "frontier-Wan2.1-T2V-unguided-4"
    assert len(frontier) == 1 + 4 * 4


SLOW = ("cluster-aurora-predicted", "cluster-aurora-4-nodes", "cluster-aurora-paper-sd35", "cluster-ethernet")
"""Runs whose best settings take seconds to find."""


@pytest.mark.parametrize(
    "run",
    [pytest.param(run, id=run.name, marks=[pytest.mark.slow] * (run.name in SLOW)) for run in suite.select("cluster")],
)
def test_cells_of_clusters_are_valid_and_have_the_psnr_of_the_frontier(run: BenchRun, tmp_path: Path) -> None:
    words = run.command.replace(" --predict", "").split()
    options = {name.removeprefix("--"): value for name, value in zip(words[2::2], words[3::2], strict=True)}
    lists = (options[name] for name in ("machine", "nodes", "model", "resolution"))
    cells = requested_cells.request(requested_cells.parse_cells(*lists), options["modes"], "--predict" in run.command)
    assert not [each.problem for each in cells if each.problem]
    assert options["repeats"] == "3"  # a median of two is their mean, which one disturbed run moves
    assert "--quality" not in run.arguments(tmp_path)
    frontier = tmp_path / "frontier.json"
    frontier.touch()
    arguments = run.arguments(tmp_path)
    assert arguments[arguments.index("--quality") + 1] == str(frontier)


def test_the_cells_of_the_papers_table_are_predicted_with_all_its_parts() -> None:
    runs = suite.select("cluster-aurora-paper")
    assert len(runs) == 3 and all("--predict" in run.command for run in runs)
    for run in runs:
        modes = run.command.partition("--modes ")[2].split()[0].split(",")
        assert {row_names.TAPA, row_names.TAPA_AND_V_MAJOR, "v-first", "paper"} <= {*modes}


def test_a_failed_run_is_reported_and_retried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs, of which one fails until a file exists."""
    code = (
        "import pathlib, sys; file = pathlib.Path(sys.argv[1]); print('the table of', file.stem);"
        "is_there = file.stem == 'first' or (file.parent / 'waited-for').exists();"
        "is_there and file.write_text('{}'); sys.exit(not is_there)"
    )
    monkeypatch.setattr(BenchRun, "arguments", lambda self, out: [sys.executable, "-c", code, str(self.record(out))])
    monkeypatch.setattr(suite, "RUNS", tuple(BenchRun(name, "bench kernels") for name in ("first", "second")))
    command, out = ["bench", "all", "--out", str(tmp_path / "out")], tmp_path / "out"
    assert cli.main(command) == 1
    said = capsys.readouterr().out
    assert f"second failed; see {out / 'second.log'}" in said and "the table of first" in said
    assert "first failed" not in said and "the table of second" not in said
    made = (out / "first.json").stat().st_mtime_ns
    (out / "waited-for").touch()
    assert cli.main(command) == 0
    assert (out / "first.json").stat().st_mtime_ns == made
    assert (out / "second.txt").read_text() == "the table of second\n"


def test_clusters_whose_record_may_lack_cells_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(BenchRun, "arguments", lambda self, out: [sys.executable, "-c", f"print('ran {self.name}')"])
    runs = [BenchRun("cluster-pcie", "bench cluster --machine pcie"), BenchRun("kernels", "bench kernels")]
    for run in runs:
        run.record(tmp_path).write_text("{}")
        (tmp_path / f"{run.name}.txt").write_text("ran before\n")
    assert suite.execute(runs, tmp_path) == []
    texts = [(tmp_path / f"{run.name}.txt").read_text() for run in runs]
    assert texts == ["ran cluster-pcie\n", "ran before\n"]


def test_a_run_stops_with_its_command(tmp_path: Path) -> None:
    """Otherwise an emulated cluster would keep running."""
    inner = "import sys, time, pathlib; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
    outer = (
        "import sys; from pathlib import Path; from xfuser_cocodiff.lab.bench import suite;"
        f"suite._status([sys.executable, '-c', {inner!r}, sys.argv[1]], {{}}, Path(sys.argv[1] + '.txt'))"
    )
    process = subprocess.Popen([sys.executable, "-c", outer, str(tmp_path / "began")])
    while not (tmp_path / "began").exists():
        assert process.poll() is None
        time.sleep(0.05)
    [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    assert not Path(f"/proc/{child}").exists()
