"""The planted bugs of tests/mutants.toml, and what scripts/mutants.py counts."""

import importlib.util
import os
import subprocess
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


def test_bugs_are_in_all_packages(mutants: ModuleType) -> None:
    packages = {str(Path(each.file).parent) for each in mutants.read()}
    folders = [folder for top in ("engine", "xdit") for folder in (ROOT / "xfuser_cocodiff" / top).iterdir()]
    assert {f"{each.parent.name}/{each.name}" for each in folders if (each / "__init__.py").is_file()} <= packages
    assert {"cli", "tools"} <= {each.split("/")[0] for each in packages}


@pytest.mark.slow  # starts processes that import everything; no quick test does
def test_bug_is_noticed_in_a_copy_and_hangs_are_ended(tmp_path: Path) -> None:
    tests = "import time, xfuser_cocodiff\ndef test_hang(): time.sleep(600)\ndef test_bug(): assert 0\n"
    tests += "import os\ndef test_hub(): open(os.environ['HF_HOME'] + '/lock', 'w')\n"
    (tmp_path / "test_it.py").write_text(tests)
    code = (
        "import mutants, pathlib\ncopy = pathlib.Path.cwd()\n"
        "mutants._LIBRARIES = ('torch', 'pytest')\n"  # others take longer, and these tests need none
        "mutants.prepare(copy / 'hub')\n"
        "print(mutants.run_tests(copy, ('test_it.py::test_bug',), 300))\n"
        "print(mutants.run_tests(copy, ('test_it.py::test_hang',), 1))\n"
        "print(mutants.run_tests(copy, ('test_it.py::test_hub',), 300))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert done.stdout.splitlines() == ["('killed', 'test_it.py::test_bug')", "('hung', '')", "('survived', '')"]
