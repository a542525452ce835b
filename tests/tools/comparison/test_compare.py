"""`cocodiff compare` with a small script instead of xDiT; test_two_nodes compares runs of xDiT."""

import functools
import json
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from xfuser_cocodiff import cli
from xfuser_cocodiff.tools.comparison import launch, report
from xfuser_cocodiff.tools.launching import command_line

SIGNALS = (signal.SIGINT, 130), (signal.SIGTERM, 143)
"""Signals, each with the exit status of the interrupted command."""


def test_variants_differ_by_the_options_of_the_plugin(tmp_path: Path) -> None:
    environment = {"COCODIFF_ENABLE": "1", "COCODIFF_A2A": "flat", "COCODIFF_DISABLE": "1", "HOME": "h"}
    environment["COCODIFF_SHARE_DEVICE"] = "1"  # the only option that acts without the plugin
    line = ["--ulysses_degree=2", "--cocodiff_share_device", "--use-cocodiff", "--warmup_calls", "3"]
    line += ["--cocodiff_a2a", "flat"]
    stock, exact = launch.make_variants(line, environment, tmp_path, 5)
    assert (stock.name, exact.name) == ("stock", "plugin")
    assert stock.environment == {"HOME": "h", "COCODIFF_SHARE_DEVICE": "1"}
    assert exact.environment == {**stock.environment, "COCODIFF_ENABLE": "1", "COCODIFF_A2A": "flat"}
    plain = ["--ulysses_degree=2", "--cocodiff_share_device", "--warmup_calls", "3"]
    assert stock.arguments == [*plain, "--num_iterations=5", f"--output_directory={tmp_path}/output/stock"]
    assert exact.arguments[: len(plain) + 4] == [
        *plain,
        "--cocodiff_a2a",
        "flat",
        "--use_cocodiff",
        "--num_iterations=5",
    ]


SCRIPT = """
    import json, os, pathlib, sys, time
    folder, rank = pathlib.Path(os.environ["COCODIFF_RECORD"]), int(os.environ["RANK"])
    folder.mkdir(parents=True, exist_ok=True)
    is_plugin = "--use_cocodiff" in sys.argv
    if is_plugin and "--hang-plugin" in sys.argv:
        (folder / "hangs").touch()
        time.sleep(600)
    if "--fail" in sys.argv:
        raise ValueError("no such scheduler")
    steps = [{"seconds": 0.1, "a2a_seconds": {"flat": 0.01}, "sent_bytes": {"flat": 10}}]
    is_different = {"--differ-if-fast", "--cocodiff_mode=fast"} <= {*sys.argv}
    digest = "plugin" if is_plugin and is_different else "stock"
    run = {"total_steps": 1, "steps": steps, "peak_memory_bytes": 5, "latents_sha256": digest}
    modes = [word.partition("=")[2] for word in sys.argv if word.startswith("--cocodiff_mode=")]
    degrees = {"degree": int(sys.argv[2]), "ring_degree": 1}
    engine = {"rank": rank, "arguments": sys.argv, "topology": None, "device": "CPU", **degrees}
    engine["exchange"] = {"flat": "heads"} if is_plugin else {}
    engine["mode"] = (modes or ["exact"])[0] if is_plugin else None
    (folder / f"rank{rank}.json").write_text(json.dumps({**engine, "runs": [run]}))
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that makes the command line to compare a script, which writes records like a pipeline."""
    file = tmp_path / "example.py"
    file.write_text(textwrap.dedent(SCRIPT))

    def line(*arguments: str, repeats: int = 1) -> list[str]:
        options = ["compare", "--out", str(tmp_path / "out"), "--repeats", str(repeats), "--"]
        return [*options, str(file), "--ulysses_degree", "2", *arguments]

    return line


@pytest.fixture
def launcher(tmp_path: Path) -> str:
    """Return a launcher that starts a number of ranks, as mpiexec does, and prints that number."""
    file = tmp_path / "launch.py"
    file.write_text(
        "import os, subprocess, sys\n"
        "count, program = int(sys.argv[1]), sys.argv[2:]\n"
        "ranks = [subprocess.Popen(program, env={**os.environ, 'RANK': str(rank)}) for rank in range(count)]\n"
        "print('launched', count)\n"
        "sys.exit(max(rank.wait() for rank in ranks))\n"
    )
    return f"{sys.executable} '{file}' {{ranks}}"


@pytest.fixture
def quick_script(script: Callable[..., list[str]], launcher: str) -> Callable[..., list[str]]:
    """Return the same function for a launcher that starts faster than torchrun."""
    return lambda *arguments, **more: ["compare", "--launcher", launcher, *script(*arguments, **more)[1:]]


def test_many_modes_are_compared_to_one_baseline(quick_script: Callable, tmp_path: Path, capsys) -> None:
    line = quick_script("--differ-if-fast")
    assert (
        cli.main([line[0], "--modes", "exact,fast", *line[1:]]) == 1
    )  # fast differs, although no compression was active
    printed = capsys.readouterr().out
    assert [printed.count(f"{variant} 1: started") for variant in ("stock", "exact", "fast")] == [1, 1, 1]
    runs = json.loads((tmp_path / "out/report.json").read_text())["runs"]
    assert [(run["name"], run["latents"]["bit_equal"]) for run in runs] == [
        ("stock", True),
        ("exact", True),
        ("fast", False),
    ]
    assert "--cocodiff_mode=fast" in runs[2]["command"]
    # One table with a row for each, and the verdict on the one that differs.
    assert re.search(r"^ *stock +100 ms +- +10 B +- +- *$", printed, re.MULTILINE)
    pattern = r"^ *exact +100 ms +no significant difference +10 B +equal +bit-identical *$"
    assert re.search(pattern, printed, re.MULTILINE)
    assert re.search(r"^ *fast +100 ms +no significant difference +10 B +- +differs *$", printed, re.MULTILINE)
    assert "Not bit-identical to stock." in printed and "Bit-identical" not in printed


def test_launcher_is_told_the_number_of_ranks() -> None:
    xdit = command_line.launch_command(
        ["--model", "M", "--ulysses_degree=2", "--ring_degree", "3"], ["mpiexec", "-n", "{ranks}", "rank it"]
    )
    assert xdit[:5] == ["mpiexec", "-n", "6", "rank it", sys.executable]
    assert xdit[5:] == ["-m", "xfuser.runner", "--model", "M", "--ulysses_degree=2", "--ring_degree", "3"]


def test_records_of_two_comparisons_are_compared(quick_script: Callable, tmp_path: Path, capsys) -> None:
    """So that stock need not run again; the folders of nodes may be apart, and each has several launches."""
    command, *line = quick_script(repeats=2)
    assert cli.main([command, "--json", str(tmp_path / "copy.json"), *line]) == 0
    assert (tmp_path / "copy.json").read_text() == (tmp_path / "out/report.json").read_text()
    printed = capsys.readouterr().out
    order = [printed.index(f"{launched}: started") for launched in ("stock 1", "plugin 1", "plugin 2", "stock 2")]
    assert order == sorted(order)
    assert "Bit-identical to stock." in printed and "Collectives of exact: flat heads; sent: flat 10 B" in printed
    stock, plugin = tmp_path / "out/records/stock", tmp_path / "out/records/plugin"
    for node in range(2):
        (tmp_path / f"plugin/node{node}").mkdir(parents=True)
        for launched in (1, 2):
            (tmp_path / f"plugin/node{node}/{launched}").mkdir()
            file = plugin / f"{launched}/rank{node}.json"
            file.rename(tmp_path / f"plugin/node{node}/{launched}/rank{node}.json")
    line = ["compare", str(stock), str(tmp_path / "plugin"), "--out", str(tmp_path / "second")]
    assert cli.main(line) == 0
    assert "exact: no significant difference in step time, bit-identical." in capsys.readouterr().out
    record = json.loads((tmp_path / "second/report.json").read_text())
    assert [(run["name"], run["step_seconds"]) for run in record["runs"]] == [
        ("stock", [0.1] * 2),
        ("exact", [0.1] * 2),
    ]
    (tmp_path / "plugin/node1/2/rank1.json").unlink()
    assert cli.main(line) == 2
    assert "the records are incomplete" in capsys.readouterr().err
    assert cli.main(line[:2]) == 2
    assert "give two folders" in capsys.readouterr().err


def test_failed_launch_is_status_2_with_its_error(script: Callable, capsys) -> None:
    assert cli.main(script("--fail")) == 2
    printed = capsys.readouterr().err
    assert "the stock 1 launch failed with exit status 1: ValueError: no such scheduler" in printed
    assert 'raise ValueError("no such scheduler")' in printed


@pytest.mark.slow  # a dozen processes import PyTorch
@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_interrupt_stops_all_processes_and_keeps_the_baseline(
    script: Callable, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    # Shells start background processes with SIGINT ignored, and the tests may run in one.
    heed_sigint = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    interrupted = [sys.executable, "-m", "xfuser_cocodiff.cli", *script("--hang-plugin")]
    process = subprocess.Popen(interrupted, preexec_fn=heed_sigint, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "out/records/plugin/1/hangs").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == status
    assert (tmp_path / "out/records/stock/1/rank1.json").exists()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(tmp_path).encode() not in file.read_bytes()
        except OSError:
            continue


def test_missing_libraries_are_named_before_the_first_launch(script: Callable, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(report, "LIBRARIES", ("jinja2", "no_such_library"))
    assert cli.main(script()) == 2
    assert "no_such_library: pip install 'xfuser-cocodiff[report]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_imports_no_large_library() -> None:
    code = "import sys, xfuser_cocodiff.cli; print([m for m in ('torch', 'rich', 'jinja2') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
