"""`cocodiff demo` with a stand-in for the comparisons, which have tests of their own."""

import argparse
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from xfuser_cocodiff import cli
from xfuser_cocodiff.cli import compare, demo

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/demo.sh"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Return a function that runs the command, and returns its status and the options of each comparison."""
    monkeypatch.chdir(tmp_path)

    def call(
        *arguments: str, statuses: tuple[int, int] = (0, 0), problem: str = ""
    ) -> tuple[int, list[argparse.Namespace], list]:
        parts: list[argparse.Namespace] = []
        started: list[list[str]] = []

        def start(line: list, **_: object) -> subprocess.CompletedProcess:
            started.append([str(word) for word in line])
            return subprocess.CompletedProcess(line, 0, stderr=problem)

        monkeypatch.setattr(subprocess, "run", start)

        def compared(options: argparse.Namespace) -> int:
            parts.append(options)
            status = statuses[len(parts) - 1]
            if status < 2:
                options.out.mkdir(parents=True, exist_ok=True)
                (options.out / "report.html").write_text(f"part {len(parts)}")
            return status

        monkeypatch.setattr(compare, "run", compared)
        return cli.main(["demo", *arguments]), parts, started

    with mock.patch.dict(os.environ):
        yield call


def page() -> str:
    return Path("cocodiff-report/report.html").read_text()


def test_both_parts_run_the_same_command(run: Callable, capsys: pytest.CaptureFixture) -> None:
    status, (first, second), [models, tried] = run()
    assert status == 0 and page() == "part 2"
    assert models[1:3] == ["-m", "small_models"] and models[-1] == "FLUX.1-dev"
    assert first.xdit_arguments == second.xdit_arguments == [*demo.ARGUMENTS]
    assert (first.modes, second.modes) == ((), ("exact", "balanced", "fast"))
    assert "torch.distributed.run" in first.launcher and first.out != second.out
    assert [*map(str, second.launcher), "true"] == tried
    assert " ".join(tried[1:]) == f"{ROOT}/emulation --preset ethernet --scale 10 --topology 2x2 -- true"
    assert (os.environ["COCODIFF_CACHE"], os.environ["HF_HUB_OFFLINE"]) == ("off", "1")
    assert capsys.readouterr().out.splitlines()[-1] == f"Report: {Path.cwd()}/cocodiff-report/report.html"


def test_part_2_is_skipped_without_namespaces(run: Callable, capsys: pytest.CaptureFixture) -> None:
    status, parts, _ = run(problem="they are not permitted here")
    assert (status, len(parts), page()) == (0, 1, "part 1")
    assert "cannot emulate slow links between nodes. they are not permitted here" in capsys.readouterr().out


def test_arguments_replace_those_of_xdit(run: Callable) -> None:
    arguments = ["--model", "Qwen-Image", "--ulysses_degree", "2", "--cocodiff-mode=fast"]
    _, parts, [models, _] = run("--", *arguments)
    assert models[-1] == "Qwen-Image"
    assert [part.xdit_arguments for part in parts] == [arguments] * 2
    assert [part.modes for part in parts] == [(), ()]
    assert "node=2,gpu=1" in parts[1].launcher


@pytest.mark.parametrize(
    ("statuses", "status", "parts", "shown"),
    [
        ((1, 0), 1, 2, "part 2"),  # not bit-identical: the report is written, and the command fails
        ((0, 1), 1, 2, "part 2"),
        ((0, 2), 2, 2, "part 1"),
        ((130, 0), 130, 1, None),
    ],
)
def test_failures_are_the_exit_status(
    statuses: tuple[int, int], status: int, parts: int, shown: str | None, run: Callable
) -> None:
    found, ran, _ = run(statuses=statuses)
    assert (found, len(ran)) == (status, parts)
    assert page() == shown if shown else not Path("cocodiff-report/report.html").exists()


def test_without_the_repository_it_says_where_the_models_are(
    run: Callable, monkeypatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(demo, "__file__", "/usr/lib/python/site-packages/xfuser_cocodiff/cli/demo.py")
    status, parts, _ = run()
    assert (status, parts) == (2, [])
    assert "clone the repository" in capsys.readouterr().err


def test_ranks_that_two_nodes_do_not_divide_are_refused(run: Callable, capsys: pytest.CaptureFixture) -> None:
    assert run("--", "--model", "FLUX.1-dev", "--ulysses_degree", "3")[0] == 2
    assert "3 ranks are not valid; valid are even numbers" in capsys.readouterr().err
