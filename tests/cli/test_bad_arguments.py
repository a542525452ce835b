"""Command lines that are not valid: one line that names the argument, and exit status 2, before ranks connect."""

import pytest

from xfuser_cocodiff import cli
from xfuser_cocodiff.tools.launching import rank_group

PLAN = ["plan", "--model", "flux1", "--resolution", "1024"]
MODEL = [*PLAN, "--nodes", "1", "--machine", "aurora"]
BAD = [
    *([*MODEL, "--mode", "lossy"], [*MODEL, "--steps", "0"], [*MODEL, "--batch", "-1"], [*MODEL, "--text-tokens", "0"]),
    *([*MODEL, "--tflops", "0"], [*MODEL, "--tflops", "nan"], [*MODEL, "--nodes", "0"], [*MODEL, "--nodes", "-8"]),
    *([*MODEL, "--resolution", "0"], [*MODEL, "--resolution", "-16"], [*MODEL, "--resolution", "12"]),
    *([*MODEL, "--machine", "moon"], [*MODEL, "--model", "flux9"]),
    *([*PLAN, "--profile", "/nowhere.json"], [*PLAN, "--profile", "/"], [*PLAN, "--profile", "x" * 5000]),
    *(["probe", "--timeout", value] for value in ("-1", "ten", "0", "nan", "1e300", "inf")),
    *(["probe", "--topology", "rack=1"], ["probe", "--topology", "2x2"]),
    *(["quality", "--seeds", "0"], ["quality", "--steps", "x"], ["quality", "--dtype", "half"]),
    *(["env", "--ranks", "0"], ["env", "--ranks", "x"], ["env", "--typo"], ["typo"]),
]


def test_bad_arguments_are_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("ranks must not connect")

    monkeypatch.setattr(rank_group, "start", start)
    for arguments in BAD:
        try:
            status = cli.main(arguments)
        except SystemExit as ended:  # of argparse, below its usage
            status = ended.code
        printed = capsys.readouterr()
        assert (status, printed.out) == (2, ""), arguments
        said = printed.err.splitlines()[-1]
        assert said.startswith("cocodiff"), said
        argument, value = ["COMMAND", *arguments][-2:]
        words = {"--profile": "no link profile"}.get(argument, argument) if argument.startswith("--") else value
        assert words in said, said
