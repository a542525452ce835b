"""Dependencies flow one way: a module imports only what stands above it, and only `xdit` knows xDiT."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "xfuser_cocodiff"
LAYERS = (
    *(
        "device",
        "topology",
        "launcher",
        "plan",
        "profile",
        "planner",
        "quantise",
        "kernels",
        "codec",
        "modes",
        "memory",
    ),
    *("placement", "options", "config", "effect", "traffic", "roll_call", "lane", "collectives"),
    *("slow_way", "part", "coding"),
    *("virtual", "exchange", "attention", "schedule", "runtime", "stopwatch", "findings", "probe"),
    *("plan_trial", "choice", "planned"),
    *("xdit", "models", "bench", "cli"),
)
"""Top to bottom; a layer may import those before it."""
OUTSIDE = {"__init__": {"xdit"}, "auto": {"xfuser_cocodiff"}, "autoload": {"xfuser_cocodiff"}}
"""Doors of the package, which stand beside the layers."""

files = sorted(PACKAGE.rglob("*.py"))


def imports(file: Path) -> set[str]:
    """Modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def layer(module: str) -> str:
    return module.split(".")[1] if "." in module else module


@pytest.mark.parametrize("file", files, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_arrows(file: Path) -> None:
    own = layer(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts))
    modules = imports(file)
    ours = {layer(name) for name in modules if name.split(".")[0] == "xfuser_cocodiff"} - {"xfuser_cocodiff", own}
    if own in OUTSIDE:
        assert ours <= OUTSIDE[own] | {"install"}
        return
    doors = {"__version__", "install", "autoload"}  # what the package itself offers
    for name in ours - doors:
        assert LAYERS.index(name) < LAYERS.index(own), f"{own} imports {name}, which stands below it"


@pytest.mark.parametrize("file", files, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_only_xdit_imports_xdit(file: Path) -> None:
    hosts = {name for name in imports(file) if name.split(".")[0] in ("xfuser", "yunchang")}
    assert not hosts or "xdit" in file.relative_to(PACKAGE).parts


def test_every_layer_exists() -> None:
    assert {path.stem for path in PACKAGE.iterdir()} - {"__pycache__", *OUTSIDE} == set(LAYERS)
