"""docs/flags.md has a row for every option, with its help text, and for every other variable that users may set."""

import re
from pathlib import Path

from xfuser_cocodiff.engine.topology.launcher import CLUSTER_VARIABLE
from xfuser_cocodiff.xdit.settings.options import OPTIONS, OTHER_VARIABLES, TRACE_VARIABLE

PAGE = (Path(__file__).parents[3] / "docs/flags.md").read_text()
INTERNAL = {TRACE_VARIABLE, CLUSTER_VARIABLE}
"""Variables that only the plugin's own commands set."""


def rows(start: str) -> list[list[str]]:
    """Return the cells of the table rows whose first cell begins with `start`."""
    lines = [line for line in PAGE.splitlines() if line.startswith(f"| `{start}")]
    return [line.replace(r"\*", "*").strip("| ").split(" | ") for line in lines]


def test_every_flag_has_one_row_with_its_help() -> None:
    documented = [(flag, variable, meaning) for flag, variable, _, meaning in rows("--")]
    assert documented == [(f"`{option.flag}`", f"`{option.variable}`", option.help) for option in OPTIONS]


def test_choices_are_listed() -> None:
    values = {flag: re.findall("`([^`]+)`", cell) for flag, _, cell, _ in rows("--")}
    wrong = [option.flag for option in OPTIONS if option.choices and values[f"`{option.flag}`"] != [*option.choices]]
    assert not wrong


def test_every_variable_without_a_flag_has_a_row() -> None:
    documented = [variable.strip("`") for variable, *_ in rows("COCODIFF_")]
    assert sorted(documented) == sorted({*OTHER_VARIABLES} - INTERNAL - {option.variable for option in OPTIONS})
