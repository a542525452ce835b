"""Tests that docs/architecture.md lists the packages and files that exist."""

import re
from pathlib import Path

from tests.test_architecture import FLOORS

ROOT = Path(__file__).parents[2]
NAMES = {
    "GRIDS": "engine/codec/quantize.py",
    "MODES": "engine/compression/default_mode.py",
    "OPTIONS": "xdit/settings/options.py",
    "PLATFORMS": "xdit/platforms/platform.py",
}
"""Tables that the page says to extend, with their files."""


def test_every_path_of_the_page_exists() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    paths = {path for path in re.findall(r"`([\w/]+(?:\.py|\.md|/))`", page) if path != "xfuser_cocodiff/"}
    assert len(paths) > 30
    existing = {path for path in paths if (ROOT / path).exists() or (ROOT / "xfuser_cocodiff" / path).exists()}
    # Paths without a folder are in the folder of the path before them.
    names = {path for path in paths - existing if "/" not in path and [*(ROOT / "xfuser_cocodiff").rglob(path)]}
    assert paths == existing | names


def test_the_page_lists_every_package_of_the_engine_and_of_xdit() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    packages = {f"{floor}/{name}" for floor in ("engine", "xdit") for name in FLOORS[floor]}
    assert packages == set(re.findall(r"^\| `((?:engine|xdit)/\w+)` \|", page, re.MULTILINE))


def test_every_table_of_the_page_exists() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    assert {name for name in re.findall("`([A-Z]{3,})`", page)} == {*NAMES}
    for name, path in NAMES.items():
        assert re.search(rf"^{name}\b.*=", (ROOT / "xfuser_cocodiff" / path).read_text(), re.MULTILINE), name
