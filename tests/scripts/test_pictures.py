"""Pictures of the documentation are what their scripts draw."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs/pictures"


def script(name: str) -> ModuleType:
    """Return a script of the pictures as a module."""
    spec = importlib.util.spec_from_file_location(name, PICTURES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_of_the_packages_is_up_to_date() -> None:
    assert (PICTURES / "packages.svg").read_text() == script("packages").draw()


def test_the_picture_has_every_package() -> None:
    packages = script("packages")
    found = {
        floor.name: sorted(path.name for path in floor.iterdir() if (path / "__init__.py").exists())
        for floor in (ROOT / packages.PACKAGE).iterdir()
        if (floor / "__init__.py").exists()
    }
    assert found == {floor: sorted(names) for floor, (_, _, names) in packages.FLOORS.items()}
