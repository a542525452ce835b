"""The table of model families: it has all of xDiT's models, and agrees with the tests."""

from pathlib import Path

from tests import ranks
from tests.xdit import (
    families,
    test_families_coded,
    test_more_pipelines,
    test_pipelines,
    test_run_loops,
    test_transformers,
)
from tests.xdit.families import FAMILIES

SMALL = [model for family in FAMILIES for model in family.small_models]


def registered(rank: int) -> list[str]:
    from xfuser.model_executor.models.runner_models import base_model

    return sorted(base_model.MODEL_REGISTRY)


def test_each_name_in_the_runner_belongs_to_one_family() -> None:
    [found] = ranks.run(registered, 1)
    names = [name for family in FAMILIES for name in family.names]
    assert sorted(names) == sorted(name for name in found if "/" not in name)


def test_every_family_is_tested() -> None:
    transformers = [small for small in SMALL if small not in families.PIPELINE_TESTS]
    assert sorted(transformers) == sorted(test_transformers.CASES)
    # Lossy modes are tested there too.
    assert {*families.PIPELINE_TESTS} - {*test_more_pipelines.MODELS} == {*test_pipelines.MODELS}
    coded = {model for family in FAMILIES if family.lossy is True for model in family.small_models}
    assert coded - {*families.PIPELINE_TESTS} == {*test_families_coded.CODED}
    assert sorted(loop for family in FAMILIES for loop in family.small_pipelines) == sorted(test_run_loops.LOOPS)
    assert {family.name for family in FAMILIES if family.tested == "-"} == {"Causal Wan"}
    root = Path(__file__).parents[2]
    files = [where for family in FAMILIES if family.tested != "-" for where in family.tested.split("; ")]
    assert all((root / where.partition(":")[0]).exists() for where in files)


def test_the_models_page_equals_the_table() -> None:
    lines = (Path(__file__).parents[2] / "docs/models.md").read_text().splitlines()
    rows = [tuple(line.strip("| ").split(" | ")) for line in lines if line.startswith("|")]
    assert rows[:1] + rows[2:] == [families.COLUMNS, *families.cells()]
