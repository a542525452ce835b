"""The table of families: all of xDiT's models are in it, and what it says of them is what tests see."""

import json
from pathlib import Path

import pytest

from tests import ranks
from tests.xdit import test_families_coded, test_more_pipelines, test_pipelines, test_run_loops, test_transformers
from xfuser_cocodiff import cli
from xfuser_cocodiff.lab.models import families
from xfuser_cocodiff.lab.models.families import FAMILIES

SMALL = [model for family in FAMILIES for model in family.small]


def registered(rank: int) -> list[str]:
    from xfuser.model_executor.models.runner_models import base_model

    return sorted(base_model.MODEL_REGISTRY)


def test_every_name_of_the_runner_is_in_one_family() -> None:
    [found] = ranks.run(registered, 1)
    names = [name for family in FAMILIES for name in family.names]
    assert sorted(names) == sorted(name for name in found if "/" not in name)


def test_every_family_is_tested() -> None:
    transformers = [small for small in SMALL if small not in families.PIPELINES]
    assert sorted(transformers) == sorted(test_transformers.CASES)
    assert {*families.PIPELINES} - {*test_more_pipelines.MODELS} == {*test_pipelines.MODELS}  # which code as well
    coded = {model for family in FAMILIES if family.coded is True for model in family.small}
    assert coded - {*families.PIPELINES} == {*test_families_coded.CODED}
    assert sorted(loop for family in FAMILIES for loop in family.loops) == sorted(test_run_loops.LOOPS)
    assert {family.name for family in FAMILIES if family.tested == "-"} == {"Causal Wan"}
    root = Path(__file__).parents[2]
    said = [where for family in FAMILIES if family.tested != "-" for where in family.tested.split("; ")]
    assert all((root / where.partition(":")[0]).exists() for where in said)


def test_the_page_is_the_table() -> None:
    lines = (Path(__file__).parents[2] / "docs/models.md").read_text().splitlines()
    rows = [tuple(line.strip("| ").split(" | ")) for line in lines if line.startswith("|")]
    assert rows[:1] + rows[2:] == [families.COLUMNS, *families.cells()]


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["models", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(family.name in printed for family in FAMILIES)
    assert cli.main(["models", "--list", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == 1
    assert [row["family"] for row in record["rows"]] == [family.name for family in FAMILIES]
    assert record["rows"][0]["v_first"] == ["add_v_proj", "to_v"]
    causal = next(row for row in record["rows"] if row["names"] == ["CausalWan"])
    assert not causal["exact"] and isinstance(causal["v_first"], str) and isinstance(causal["coded"], str)


@pytest.mark.parametrize(
    ("line", "said"), [(["--json", "--out", "x"], "--json goes with --list"), (["--list", "SD3.5"], "takes no names")]
)
def test_options_that_do_not_go_together(line: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["models", *line]) == 2
    assert said in capsys.readouterr().err
