"""The table of model families: it has all of xDiT's models, and agrees with the tests."""

from pathlib import Path

from tests import ranks
from tests.xdit import families, test_pipelines, test_transformers
from tests.xdit.families import FAMILIES


def registered(rank: int) -> list[str]:
    from xfuser.model_executor.models.runner_models import base_model

    return sorted(base_model.MODEL_REGISTRY)


def test_each_name_in_the_runner_belongs_to_one_family() -> None:
    [found] = ranks.run(registered, 1)
    names = [name for family in FAMILIES for name in family.names]
    assert sorted(names) == sorted(name for name in found if "/" not in name)


def test_every_family_is_tested() -> None:
    small = [model for family in FAMILIES for model in family.small_models]
    assert sorted(small) == sorted([*test_transformers.CASES, *test_pipelines.MODELS])
    assert [family.name for family in FAMILIES if not family.small_models] == ["Causal Wan"]


def test_the_models_page_equals_the_table() -> None:
    lines = (Path(__file__).parents[2] / "docs/models.md").read_text().splitlines()
    rows = [tuple(line.strip("| ").split(" | ")) for line in lines if line.startswith("|")]
    assert rows[:1] + rows[2:] == [families.COLUMNS, *families.cells()]
