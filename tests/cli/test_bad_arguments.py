"""Command lines that are not valid: one line that names the argument, and exit status 2, before ranks connect."""

import pytest

from xfuser_cocodiff import cli
from xfuser_cocodiff.lab.launching import bare_runtime

MODEL = ["plan", "--model", "flux1", "--resolution", "1024", "--degree", "8", "--cluster", "aurora"]
BAD = [
    *([*MODEL, "--mode", "lossy"], [*MODEL, "--steps", "0"], [*MODEL, "--batch", "-1"], [*MODEL, "--text-tokens", "0"]),
    *([*MODEL, "--topology", "3x"], [*MODEL, "--tflops", "0"], [*MODEL, "--tflops", "nan"], [*MODEL, "--degree", "0"]),
    *([*MODEL, "--resolution", "0"], [*MODEL, "--resolution", "-16"], [*MODEL, "--degree", "-8"]),
    *([*MODEL, "--cluster", "moon"], [*MODEL, "--model", "flux9"], ["plan", "--degree", "8"]),
    *(["plan", option, value] for option, value in (("--mode", "fast"), ("--tflops", "9"), ("--cluster", "aurora"))),
    *(["plan", "--profile", "/nowhere.json"], ["plan", "--profile", "/"], ["plan", "--profile", "x" * 5000]),
    *(["plan", "--sizes", "0"], ["plan", "--sizes", ""], ["plan", "--sizes", "4XB"], ["plan", "--sizes", "9" * 5000]),
    *(
        ["plan", "--timeout", "0"],
        ["plan", "--timeout", "nan"],
        ["plan", "--timeout", "1e300"],
        ["plan", "--timeout", "inf"],
    ),
    *(["probe", "--timeout", "-1"], ["probe", "--timeout", "ten"], ["probe", "--topology", "rack=1"]),
    *(["simulate", "--nodes", nodes] for nodes in ("0", "-1", "", "two", "1;2")),
    *(["simulate", "--resolution", "12"], ["simulate", "--resolution", "0"], ["simulate", "--batch", "0"]),
    *(["simulate", "--model", "x"], ["simulate", "--mode", "x"], ["simulate", "--cluster", "x"]),
    *(["env", "--degree", "0"], ["env", "--degree", "x"], ["env", "--typo"], ["typo"]),
]


def test_bad_arguments_are_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("ranks must not connect")

    monkeypatch.setattr(bare_runtime, "start", start)
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
