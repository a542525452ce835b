"""`cocodiff compare`: what it launches and how it ends, with a tiny script. test_emulate has a real run of xDiT."""

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

from tests.quick import slow_but
from xfuser_cocodiff import cli
from xfuser_cocodiff.lab.comparison import compare, launch, report
from xfuser_cocodiff.xdit.launching import command_line

SIGNALS = (signal.SIGINT, 130), (signal.SIGTERM, 143)
"""And the exit status that they lead to."""


def test_options_are_read_in_every_spelling() -> None:
    line = ["--ulysses_degree", "2", "--num-iterations=4", "--use-cocodiff", "--prompt", "a cat", "--use_cocodiff"]
    assert command_line.option_value(line, "ulysses_degree") == "2"
    assert command_line.option_value(line, "num_iterations") == "4"
    assert command_line.option_value(line, "seed") is None
    assert command_line.option_value(["--seed", "1", "--seed=2"], "seed") == "2"
    assert command_line.without_flag(line, "use_cocodiff") == line[:3] + line[4:6]


def test_the_sides_differ_by_one_flag(tmp_path: Path) -> None:
    environment = {"COCODIFF_ENABLE": "1", "COCODIFF_A2A": "flat", "COCODIFF_DISABLE": "1", "HOME": "h"}
    line = ["--ulysses_degree=2", "--use-cocodiff", "--warmup_calls", "3", "--cocodiff_a2a", "flat"]
    stock, exact = compare.contend(line, environment, tmp_path, 5)
    assert (stock.name, exact.name) == ("stock", "exact")
    assert stock.environment == {"HOME": "h"}
    assert exact.environment == {**stock.environment, "COCODIFF_ENABLE": "1", "COCODIFF_A2A": "flat"}
    plain = ["--ulysses_degree=2", "--warmup_calls", "3"]
    assert stock.arguments == [*plain, "--num_iterations=5", f"--output_directory={tmp_path}/output/stock"]
    assert exact.arguments[: len(plain) + 4] == [
        *plain,
        "--cocodiff_a2a",
        "flat",
        "--use_cocodiff",
        "--num_iterations=5",
    ]


def test_stock_has_none_of_the_plugins_options_but_shares_the_device() -> None:
    line = ["a.py", "--cocodiff-share-device", "--cocodiff_mode=fast", "--seed", "1", "--cocodiff-a2a", "flat", "--x"]
    assert command_line.stock_arguments([*line, "--use-cocodiff"]) == [
        "a.py",
        "--cocodiff-share-device",
        "--seed",
        "1",
        "--x",
    ]
    assert command_line.arguments_for_stock(
        [*line, "--master_port", "1", "--output-directory=o"]
    ) == command_line.stock_arguments(line)
    stock, _ = compare.contend(line, {"COCODIFF_SHARE_DEVICE": "1", "COCODIFF_MODE": "fast"}, Path(), 1)
    assert stock.environment == {"COCODIFF_SHARE_DEVICE": "1"}


def test_each_mode_is_a_side(tmp_path: Path) -> None:
    line = ["--ulysses_degree=2", "--cocodiff_a2a", "flat"]
    stock, exact, fast = compare.contend(line, {"COCODIFF_MODE": "paper"}, tmp_path, 1, modes=("exact", "fast"))
    assert (stock.name, exact.name, fast.name) == ("stock", "exact", "fast")
    assert stock.arguments[:2] == ["--ulysses_degree=2", "--num_iterations=1"]
    for side in (exact, fast):
        assert side.arguments[:5] == [*line, f"--cocodiff_mode={side.name}", "--use_cocodiff"]


@pytest.mark.parametrize(
    ("line", "environment", "name"),
    [([], {}, "balanced"), (["--cocodiff_mode=fast"], {}, "fast"), ([], {"COCODIFF_MODE": "paper"}, "paper")],
)
def test_a_side_is_called_as_the_mode_that_it_has(
    line: list[str], environment: dict[str, str], name: str, tmp_path: Path
) -> None:
    _, side = compare.contend([*line, "--ulysses_degree=2"], environment, tmp_path, 1, usual="balanced")
    assert side.name == name


SCRIPT = """
    import gzip, json, os, pathlib, sys, time
    folder, rank = pathlib.Path(os.environ["COCODIFF_RECORD"]), int(os.environ["RANK"])
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        (folder / "progress.json").write_text(json.dumps({"run": 1, "step": 1, "total_steps": 1}))
    is_plugin = "--use_cocodiff" in sys.argv
    if is_plugin and "--hang-plugin" in sys.argv:
        time.sleep(600)
    if "--fail" in sys.argv or is_plugin and "--fail-plugin" in sys.argv:
        raise ValueError("no such scheduler")
    none = {"in_flight_seconds": 0, "hidden_seconds": 0}
    steps = [{"seconds": 0.1, "a2a_seconds": {"flat": 0.01}, "sent_bytes": {"flat": 10}, **none}]
    is_other = "--differ" in sys.argv or {"--differ-if-fast", "--cocodiff_mode=fast"} <= {*sys.argv}
    digest = "plugin" if is_plugin and is_other else "stock"
    run = {"total_steps": 1, "steps": steps, "peak_memory_bytes": 5, "latents_sha256": digest}
    engine = {"rank": rank, "degree": 2, "topology": None, "device": "CPU"}
    time.sleep(0.5)
    if "COCODIFF_TRACE" in os.environ:
        event = {"ph": "X", "pid": 7, "tid": 1, "ts": 5, "dur": 1, "name": "add", "id": 3, "cat": "user_annotation"}
        v = {**event, "name": "cocodiff.v.exchange"}
        launch = {**event, "cat": "cuda_runtime", "args": {"correlation": 1}}
        sent = {**launch, "cat": "gpu_memcpy", "tid": 20, "dur": 4}
        kernels = [{**launch, "args": {"correlation": 2}, "tid": 2, "cat": cat} for cat in ("cuda_runtime", "kernel")]
        text = json.dumps({"baseTimeNanoseconds": 1000 * rank, "traceEvents": [event, v, launch, sent, *kernels]})
        (folder / f"trace{rank}.json.gz").write_bytes(gzip.compress(text.encode()))
    if "--silent" not in sys.argv:
        (folder / f"rank{rank}.json").write_text(json.dumps({**engine, "runs": [run]}))
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., list[str]]:
    """The command line of a comparison of a script that leaves records as if it had run a pipeline."""
    file = tmp_path / "example.py"
    file.write_text(textwrap.dedent(SCRIPT))

    def line(*arguments: str, repeats: int = 1) -> list[str]:
        options = ["compare", "--out", str(tmp_path / "out"), "--repeats", str(repeats), "--"]
        return [*options, str(file), "--ulysses_degree", "2", *arguments]

    return line


@pytest.fixture
def launcher(tmp_path: Path) -> str:
    """A command line that starts so many ranks at once, as mpiexec does, and says how many there were."""
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
    """The same, started without torchrun, which takes seconds to import."""
    return lambda *arguments, **more: ["compare", "--launcher", launcher, *script(*arguments, **more)[1:]]


def test_a_script_is_launched_on_each_side_for_each_repeat(quick_script: Callable, tmp_path: Path, capsys) -> None:
    line = quick_script(repeats=2)
    assert cli.main([*line[:1], "--json", str(tmp_path / "copy.json"), *line[1:]]) == 0
    found = json.loads((tmp_path / "copy.json").read_text())
    assert [(run["name"], run["step_seconds"]) for run in found["runs"]] == [("stock", [0.1] * 2), ("exact", [0.1] * 2)]
    assert "--use_cocodiff" not in found["runs"][0]["command"]
    assert found["runs"][1]["command"].endswith("--use_cocodiff")
    said = capsys.readouterr().out
    assert "bit for bit" in said
    # Turns change.
    order = [said.index(f"{turn}: started") for turn in ("stock 1", "exact 1", "exact 2", "stock 2")]
    assert order == sorted(order)
    assert "stock 1: run 1" in said


def test_many_modes_are_compared_with_one_stock(quick_script: Callable, tmp_path: Path, capsys) -> None:
    line = quick_script("--differ-if-fast")
    assert cli.main([line[0], "--modes", "exact,fast", *line[1:]]) == 1  # fast differs, and encoded nothing
    said = capsys.readouterr().out
    assert [said.count(f"{side} 1: started") for side in ("stock", "exact", "fast")] == [1, 1, 1]
    runs = json.loads((tmp_path / "out/report.json").read_text())["runs"]
    assert [(run["name"], run["latents"]["bit_equal"]) for run in runs] == [
        ("stock", True),
        ("exact", True),
        ("fast", False),
    ]
    assert "--cocodiff_mode=fast" in runs[2]["command"]
    # One table, a row each, and what is wrong with the one that differs.
    assert re.search(r"^stock +100 ms +- +10 B +- +-$", said, re.MULTILINE)
    assert re.search(r"^exact +100 ms +no significant difference +10 B +equal +bit-identical$", said, re.MULTILINE)
    assert re.search(r"^fast +100 ms +no significant difference +10 B +- +differs$", said, re.MULTILINE)
    assert "Not the same result." in said and "Same result" not in said


def test_each_side_is_launched_once_more_for_traces(quick_script: Callable, tmp_path: Path, capsys) -> None:
    line = quick_script()
    assert cli.main([line[0], "--trace", *line[1:]]) == 0
    said = capsys.readouterr().out
    assert said.count("While v travelled, kernels ran on other streams for 25% of the time.") == 2
    runs = json.loads((tmp_path / "out/report.json").read_text())["runs"]
    for run in runs:
        assert run["trace"] == f"records/{run['name']}-traced/trace0.json.gz" and len(run["step_seconds"]) == 1
        assert str(tmp_path / "out" / run["trace"]) in said
    assert (tmp_path / "out/records/exact-traced/trace1.json.gz").exists()


def test_not_bit_equal_is_status_1(quick_script: Callable) -> None:
    assert cli.main(quick_script("--differ")) == 1


def test_another_launcher_starts_the_ranks(script: Callable, launcher: str, tmp_path: Path) -> None:
    line = script()
    assert cli.main([line[0], "--launcher", launcher, *line[1:]]) == 0
    assert (tmp_path / "out/logs/stock-1.log").read_text() == "launched 2\n"
    assert len(list((tmp_path / "out/records/exact-1").glob("rank*.json"))) == 2
    xdit = command_line.launch_command(
        ["--model", "M", "--ulysses_degree=2", "--ring_degree", "3"], "mpiexec -n {ranks} 'rank it'"
    )
    assert xdit[:5] == ["mpiexec", "-n", "6", "rank it", sys.executable]
    assert xdit[5:] == ["-m", "xfuser.runner", "--model", "M", "--ulysses_degree=2", "--ring_degree", "3"]


def test_stock_is_taken_from_an_earlier_comparison(
    script: Callable, launcher: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def compare(name: str, *more: str, plugin: tuple[str, ...] = (), stock: str = "") -> int:
        line = script(*plugin)
        line[line.index("--out") + 1] = str(tmp_path / name)
        earlier = ["--stock", str(tmp_path / stock)] if stock else []
        return cli.main([line[0], *earlier, "--launcher", launcher, *more, *line[1:]])

    assert compare("first") == 0
    assert compare("second", stock="first", plugin=("--cocodiff_mode", "fast")) == 0
    said = capsys.readouterr().out
    assert (said.count("stock 1: started"), said.count("fast 1: started")) == (1, 1)
    first, second = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("first", "second"))
    assert second["runs"][0] == first["runs"][0]
    assert second["runs"][1]["name"] == "fast"
    assert compare("third", stock="first", plugin=("--other", "argument")) == 2
    assert "valid here is a comparison of" in capsys.readouterr().err
    assert compare("third", stock="nowhere") == 2
    assert "nowhere is no folder of a comparison" in capsys.readouterr().err
    file = tmp_path / "first/records/stock.json"
    manifest = json.loads(file.read_text())
    manifest["host"]["torch"] = "2.0.0"
    file.write_text(json.dumps(manifest))
    assert compare("third", stock="first") == 2
    assert "ran with torch 2.0.0; valid here is xfuser 0.7" in capsys.readouterr().err


def test_a_side_that_is_finished_is_kept_when_the_other_fails(quick_script: Callable, tmp_path: Path, capsys) -> None:
    """It goes on in the same folder, and the side that failed is the one that is launched."""
    failing, whole = quick_script("--fail-plugin", repeats=2), quick_script(repeats=2)
    kept = f"stock's side is finished and kept: add --stock {tmp_path / 'out'} to go on with it"
    assert cli.main(failing) == 2
    said = capsys.readouterr()
    assert "the exact 1 launch failed" in said.err
    assert kept not in said.out  # of its two launches one was made
    assert cli.main([whole[0], "--stock", str(tmp_path / "out"), *whole[1:]]) == 2
    assert "is no folder of a comparison whose stock side is finished" in capsys.readouterr().err

    once = quick_script("--fail-plugin")
    assert cli.main(once) == 2
    assert kept in capsys.readouterr().out.replace("\n", "")
    assert not (tmp_path / "out/report.json").exists()
    assert cli.main([once[0], "--stock", str(tmp_path / "out"), *once[1:]]) == 2
    said = capsys.readouterr().out
    assert (said.count("stock 1: started"), said.count("exact 1: started")) == (0, 1)
    assert kept in said  # and still is
    # The arguments must be the same, so what made it fail was something else.
    file = tmp_path / "example.py"
    file.write_text(file.read_text().replace('"--fail-plugin"', '"--mended"'))
    assert cli.main([once[0], "--stock", str(tmp_path / "out"), *once[1:]]) == 0
    runs = json.loads((tmp_path / "out/report.json").read_text())["runs"]
    assert [run["name"] for run in runs] == ["stock", "exact"]
    assert kept not in capsys.readouterr().out


def test_a_failed_launch_is_status_2_and_says_why(script: Callable, capsys) -> None:
    assert cli.main(script("--fail")) == 2
    said = capsys.readouterr().err
    assert "the stock 1 launch failed with exit status 1: ValueError: no such scheduler" in said
    assert 'raise ValueError("no such scheduler")' in said


def test_a_launch_without_records_is_status_2(quick_script: Callable, capsys) -> None:
    assert cli.main(quick_script("--silent")) == 2
    assert "no rank recorded" in capsys.readouterr().err


@pytest.mark.parametrize(("how", "status"), slow_but([(signal.SIGINT, 130)], SIGNALS))
def test_an_interrupt_stops_every_process_and_keeps_a_side_that_is_finished(
    script: Callable, tmp_path: Path, how: signal.Signals, status: int
) -> None:
    # Shells start what runs in the background with SIGINT ignored, and tests may run there.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command_line = [sys.executable, "-m", "xfuser_cocodiff.cli", *script("--hang-plugin")]
    process = subprocess.Popen(command_line, preexec_fn=heed, stdout=subprocess.PIPE, text=True)
    progress = tmp_path / "out/records/exact-1/progress.json"
    while launch.read_progress(progress) is None:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(how)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == status
    assert f"stock's side is finished and kept: add --stock {tmp_path / 'out'} to go on with it" in said
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(tmp_path).encode() not in file.read_bytes()
        except OSError:
            continue


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compare"], "arguments are missing"),
        (["compare", "--"], "arguments are missing"),
        (["compare", "--", "--model", "M"], "--ulysses_degree is missing"),
        (["compare", "--", "--model", "M", "--ulysses_degree", "two"], "'two' is not a whole number"),
        (["compare", "--", "--ulysses_degree=2", "--num_iterations=0"], "leave nothing to compare"),
        (["compare", "--launcher", "mpiexec 'rank", "--", "--ulysses_degree=2"], '"mpiexec \'rank" is not valid: No c'),
        (["compare", "--launcher", " ", "--", "--ulysses_degree=2"], "--launcher ' ' is not valid: No command"),
        (["compare", "--", "nowhere.py", "--ulysses_degree=2"], "there is no script nowhere.py"),
        (
            ["compare", "--modes", "exact,mad", "--", "--ulysses_degree=2"],
            "--modes 'exact,mad' is not valid; valid are",
        ),
        (["compare", "--modes", "fast,fast", "--", "--ulysses_degree=2"], "each once"),
        (
            ["compare", "--modes", "exact,fast", "--", "--ulysses_degree=2", "--cocodiff-mode=fast"],
            "--modes exact,fast and --cocodiff_mode fast both say what to compare; give one",
        ),
    ],
)
def test_bad_usage_is_status_2(arguments: list[str], words: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_xdits_arguments_without_dashes_are_pointed_out(capsys) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["compare", "--model", "M"])
    assert left.value.code == 2
    assert "-- <xdit arguments" in capsys.readouterr().err


def test_degree_one_works_and_says_so(quick_script: Callable, capsys) -> None:
    line = quick_script()
    assert cli.main([*line[:-1], "1"]) == 0
    said = capsys.readouterr().out
    assert "there is no all-to-all" in said
    assert "there was no all-to-all" in said


def test_missing_libraries_are_named_before_anything_runs(script: Callable, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(report, "LIBRARIES", ("jinja2", "no_such_library"))
    assert cli.main(script()) == 2
    assert "no_such_library: pip install 'xfuser-cocodiff[report]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_is_quick_to_import() -> None:
    code = "import sys, xfuser_cocodiff.cli; print([m for m in ('torch', 'rich', 'jinja2') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
