"""scripts/demo.sh with stand-ins for its commands, which have tests of their own."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
COCODIFF = """#!/bin/bash
printf '%q ' "$@" >> calls; echo >> calls
[ "$1" = compare ] || exit 0
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case "$1" in --out) out="$2";; --emulate) part=second;; esac
    shift
done
status=0
[ "${part:-first}" != "${FAILING%%:*}" ] || status="${FAILING##*:}"
[ "$status" -gt 1 ] || { mkdir -p "$out"; echo "page of the ${part:-first} part" > "$out/report.html"; }
exit "$status"
"""
PYTHON = """#!/bin/bash
[ -z "${NO_NAMESPACES:-}" ] || { echo "emulated_cluster: $NO_NAMESPACES" >&2; exit 2; }
"""


@pytest.fixture
def demo(tmp_path: Path) -> object:
    """Return a function that runs the script with stand-ins, and returns its outcome and the calls of `cocodiff`."""
    for folder in ("scripts", "bin", "cocodiff-report"):
        (tmp_path / folder).mkdir()
    (tmp_path / "scripts/demo.sh").write_text((SCRIPTS / "demo.sh").read_text())
    (tmp_path / "scripts/environment.sh").write_text('cd "$(dirname "${BASH_SOURCE[0]}")/.."\nuse_cpu() { :; }\n')
    (tmp_path / "cocodiff-report/report.html").write_text("page of an earlier demo")
    for name, text in (("cocodiff", COCODIFF), ("python", PYTHON)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def run(*arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess, list[list[str]]]:
        done = subprocess.run(
            ["bash", tmp_path / "scripts/demo.sh", *arguments],
            env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "FAILING": "none:0", **environment},
            capture_output=True,
            text=True,
        )
        return done, [shlex.split(line) for line in (tmp_path / "calls").read_text().splitlines()]

    return run


def option(call: list[str], name: str) -> str | None:
    return call[call.index(name) + 1] if name in call[: call.index("--")] else None


def page(tmp_path: Path) -> str:
    return (tmp_path / "cocodiff-report/report.html").read_text()


def test_both_parts_run_the_same_command(demo, tmp_path: Path) -> None:
    done, calls = demo()
    assert done.returncode == 0, done.stderr
    assert calls[0] == ["models", "--out", ".models", "FLUX.1-dev"]
    first, second = calls[1:]
    assert first[first.index("--") :] == second[second.index("--") :]
    assert {"FLUX.1-dev", "4"} <= {*first[first.index("--") :]}
    assert option(first, "--emulate") is None and option(first, "--modes") is None
    assert option(second, "--emulate") == "ethernet" and option(second, "--modes") == "exact,balanced,fast"
    assert option(first, "--out") != option(second, "--out")
    assert page(tmp_path) == "page of the second part\n"
    assert done.stdout.splitlines()[-1] == f"Report: {tmp_path}/cocodiff-report/report.html"


def test_part_2_is_skipped_without_namespaces(demo, tmp_path: Path) -> None:
    done, calls = demo(NO_NAMESPACES="they are not permitted here")
    assert done.returncode == 0, done.stderr
    assert len(calls) == 2
    assert "cannot emulate slow links between nodes. emulated_cluster: they are not permitted here" in done.stdout
    assert page(tmp_path) == "page of the first part\n"
    assert done.stdout.splitlines()[-1] == f"Report: {tmp_path}/cocodiff-report/report.html"


def test_arguments_replace_those_of_xdit(demo) -> None:
    arguments = ["--model", "Qwen-Image", "--ulysses_degree", "2", "--prompt", "a cat -- and a dog"]
    _, calls = demo(*arguments)
    assert calls[0] == ["models", "--out", ".models"]  # all models
    for call in calls[1:]:
        assert call[call.index("--") + 1 :] == arguments
    for mode in (["--cocodiff_mode", "fast"], ["--cocodiff-mode=fast"]):
        _, calls = demo(*arguments, *mode)
        assert option(calls[-1], "--modes") is None


@pytest.mark.parametrize(
    ("failing", "status", "parts", "reported"),
    [
        ("first:1", 1, 2, "second"),  # not bit-identical: the report is written, and the script fails
        ("second:1", 1, 2, "second"),
        ("second:2", 2, 2, "first"),  # no comparison
        ("first:2", 2, 1, None),
        ("first:130", 130, 1, None),
    ],
)
def test_failures_are_reported_in_the_exit_status(
    failing: str, status: int, parts: int, reported: str | None, demo, tmp_path: Path
) -> None:
    done, calls = demo(FAILING=failing)
    assert (done.returncode, len(calls)) == (status, 1 + parts)
    if reported:
        assert page(tmp_path) == f"page of the {reported} part\n"
    else:
        assert "Report:" not in done.stdout
        assert not (tmp_path / "cocodiff-report/report.html").exists()
