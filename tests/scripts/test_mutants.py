"""The planted bugs of tests/mutants.toml, and what scripts/mutants.py counts."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module
    spec.loader.exec_module(module)
    return module


def test_each_bug_can_be_planted_and_has_tests(mutants: ModuleType) -> None:
    listed = mutants.read()
    assert len(listed) >= 60
    assert len({each.name for each in listed}) == len(listed)
    for each in listed:
        file = ROOT / "xfuser_cocodiff" / each.file
        planted = each.plant(file.read_text(encoding="utf-8"))
        compile(planted, each.file, "exec")
        assert each.new != each.old, each.name
        assert each.seen, each.name
        assert all((ROOT / name).exists() for name in each.selection), each.name
