"""Options that are not valid, in the xdit command and on ranks: one line, exit status 2, and before any collective.

The values are those of tests/xdit/settings/test_bad_options.py.
"""

import os
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import ranks
from tests.xdit.integration.test_flags import parse
from tests.xdit.settings.test_bad_options import BAD, FLAGS, GOOD, WORDS, flat_list

COMMAND = ["--model", "tiny", "--ulysses_degree", "4", "--nproc_per_node", "2", "--use_cocodiff"]


def arguments_of(name: str, value: str) -> list[str]:
    mode = [] if name == "mode" else ["--cocodiff_mode", "fast"]
    return [*mode, f"--cocodiff_{name}={value}"]


def run_command(arguments: list[str]) -> bool:
    """Return whether the xdit command starts ranks; it exits if it does not."""
    from xfuser_cocodiff.xdit.integration import option_errors

    started = mock.Mock()
    option_errors._with_check(started)(arguments)
    return started.called


def test_the_command_ends_with_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(COMMAND)  # its first call prints warnings of other libraries
    capsys.readouterr()
    for name, value in flat_list(BAD):
        with pytest.raises(SystemExit) as ended:
            print(run_command([*COMMAND, *arguments_of(name, value)]), name, value)
        assert ended.value.code == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"cocodiff: --cocodiff_{name}: "), line


def test_the_command_starts_ranks_with_valid_options() -> None:
    assert all(run_command([*COMMAND, *arguments_of(*case)]) for case in flat_list(GOOD))


@settings(derandomize=True, max_examples=60)
@given(
    st.integers(-2, 9),
    st.integers(-2, 4),
    st.integers(0, 9),
    st.dictionaries(st.sampled_from(FLAGS), WORDS, max_size=2),
)
def test_any_command_starts_or_ends_with_status_2(ulysses: int, ring: int, local: int, options: dict[str, str]) -> None:
    degrees = ["--ulysses_degree", str(ulysses), "--ring_degree", str(ring), "--nproc_per_node", str(local)]
    try:
        run_command(
            ["--model", "tiny", *degrees, "--use_cocodiff", *(f"--{name}={text}" for name, text in options.items())]
        )
    except SystemExit as ended:
        assert ended.code == 2


def errors_of(rank: int, cases: list[tuple[str, str]]) -> list[str]:
    """Return the error of each case on a rank on which every collective fails."""
    collectives = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "new_group")
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found = []
    with mock.patch.multiple(dist, **dict.fromkeys(collectives, None)):
        for case in cases:
            with pytest.raises(ValueError) as raised:
                parse(["--ulysses_degree", "4", "--use_cocodiff", *arguments_of(*case)], False).create_config()
            found.append(str(raised.value))
    return found


def test_every_rank_raises_the_same_error_before_any_collective() -> None:
    cases = [(name, values[-1]) for name, values in BAD.items()]
    first, *others = ranks.run(errors_of, 4, cases)
    assert others == [first] * 3
    for (name, _), error in zip(cases, first, strict=True):
        assert error.startswith(f"--cocodiff_{name}: "), error
        assert len(error.splitlines()) == 1
