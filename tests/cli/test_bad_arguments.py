"""Command lines that are not valid: an error that names option, value and valid set, before ranks connect."""

import shlex
from pathlib import Path

import pytest

from xfuser_cocodiff import cli
from xfuser_cocodiff.tools.launching import rank_group

PLAN = "plan --model flux1 --resolution 1024"
AURORA = f"{PLAN} --machine aurora"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("typo", "argument COMMAND: invalid choice: 'typo'"),
        ("env --typo", "unknown arguments: --typo"),
        ("env --ranks x", "--ranks: 'x' is not valid; valid are integers from 1"),
        ("compare", "arguments are missing"),
        ("compare --model M", "-- <xdit arguments"),
        ("compare -- --model M", "--ulysses_degree is missing"),
        ("compare -- --ulysses_degree=2 --num_iterations=0", "--num_iterations '0' is not valid; valid are integers"),
        ("compare -- nowhere.py --ulysses_degree=2", "script nowhere.py does not exist"),
        ("compare --modes exact,mad", "--modes: 'exact,mad' is not valid; valid are exact, paper, balanced, fast"),
        ("compare --modes fast,fast", "each at most once"),
        ("compare --modes fast -- --ulysses_degree=2 --cocodiff-mode=fast", "--cocodiff_mode fast are mutually"),
        ('compare --launcher "mpiexec \'rank"', "is not valid; valid is a command line"),
        (f"{PLAN} --nodes 1", "one of the arguments --machine --profile is required"),
        (f"{PLAN} --machine pcie", "either --nodes or --ranks is required"),
        (f"{PLAN} --machine moon --nodes 1", "--machine: invalid choice: 'moon'"),
        (f"{PLAN} --profile none.json", "no link profile"),
        (f"{PLAN} --profile file --nodes 2", "--nodes"),
        (f"{AURORA} --ranks 16", "--ranks 16"),
        (f"{AURORA} --nodes 1 --mode lossy", "--mode: invalid choice: 'lossy'"),
        (f"{AURORA} --nodes 1 --model flux9", "--model 'flux9' is not valid; valid are"),
        (f"{AURORA} --nodes 1 --resolution 1000", "--resolution 1000 is not valid"),
        (f"{AURORA} --nodes 1 --tflops nan", "--tflops nan is not valid; it must be greater than 0"),
        (f"{AURORA} --nodes 1 --model wan --text-tokens 64", "wan2.1-14b has no text"),
        ("probe --timeout nan", "--timeout: 'nan' is not valid; valid are seconds above 0, up to"),
        ("probe --topology rack=1", "--topology: topology 'rack=1'"),
        ("quality --modes exact", "--modes 'exact' is not valid; valid are paper, balanced, fast"),
        ("quality --mode fast@bits=3", "'3' is not valid for bits"),
        ("quality --cocodiff-memory-budget -1", "--cocodiff_memory_budget: '-1' is not valid"),
    ],
)
def test_bad_arguments_are_named(
    line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank_group, "start", lambda *_: pytest.fail("ranks must not connect"))
    try:
        status = cli.main(shlex.split(line))
    except SystemExit as ended:  # of argparse, below its usage
        status = ended.code
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "") and words in printed.err, printed.err
    assert not list(tmp_path.iterdir())
