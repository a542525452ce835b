"""Dependencies flow one way, between wings and inside them, and only `xdit` knows xDiT."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

PACKAGE = "xfuser_cocodiff"
FOLDER = Path(__file__).parent.parent / PACKAGE
ROOMS = ("patching", "platform", "layers", "engine", "attention", "clock", "door", "launching")
"""Of the wing `xdit`, to each other as wings are."""
WINGS = (
    *("machine", "kernels", "exchange", "codec", "attention", "settings", "reporting", "measuring"),
    *(f"xdit.{room}" for room in ROOMS),
    *("models", "emulation", "probing", "simulation", "comparison", "tuning", "bench", "cli"),
)
"""Top to bottom; a wing may import those before it."""
DOORS = {"": {"settings", "xdit", "comparison"}, "auto": {""}, "autoload": {""}}
"""Modules of the package itself, which stand beside the wings, and what they may import; "" is the package."""
OFFERED = {"__version__", "install", "autoload"}
"""What wings may have of the doors."""
HOSTS = {"xfuser", "yunchang"}


def name_of(file: Path) -> str:
    """A file as a module, less the package's name."""
    parts = file.relative_to(FOLDER).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for file in sorted(FOLDER.rglob("*.py"))}


def imports(file: Path) -> set[str]:
    """What a file imports, anywhere in it, with the names that it takes of modules."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules(file: Path) -> set[str]:
    """The modules of ours that a file imports; what is no module is a name of the one before the last dot."""
    own = {name.removeprefix(PACKAGE).lstrip(".") for name in imports(file) if name.split(".")[0] == PACKAGE}
    return {name if name in FILES else name.rpartition(".")[0] for name in own} - {""}


def wing(module: str) -> str | None:
    """The wing of a module; None of doors, and of `xdit`, which has nothing but rooms."""
    return next((wing for wing in WINGS if module == wing or module.startswith(f"{wing}.")), None)


IMPORTS = {module: modules(file) for module, file in FILES.items()}


def test_wings_point_one_way() -> None:
    wrong = []
    for module, targets in IMPORTS.items():
        for target in targets - set(DOORS):
            own, other = wing(module), wing(target)
            if module in DOORS:
                right = target.split(".")[0] in DOORS[module]
            else:
                right = None not in (own, other) and WINGS.index(other) <= WINGS.index(own)
            if not right:
                wrong.append(f"{module} imports {target}, which stands below it")
    assert not wrong, "\n".join(wrong)


def test_files_of_a_wing_point_one_way() -> None:
    cycles = []
    for each in WINGS:
        inside = {module for module in FILES if wing(module) == each}
        try:
            TopologicalSorter({module: IMPORTS[module] & inside for module in inside}).prepare()
        except CycleError as error:
            [*_, cycle] = error.args
            cycles += [f"{importer} imports {imported}" for imported, importer in pairwise(cycle)]
    assert not cycles, "in a circle: " + ", ".join(cycles)


def test_doors_are_only_asked_for_what_they_offer() -> None:
    for module, file in FILES.items():
        taken = {name.partition(".")[2] for name in imports(file) if name.rpartition(".")[0] == PACKAGE}
        names = {name for name in taken if name in DOORS or name not in FILES} - {wing.split(".")[0] for wing in WINGS}
        assert names <= OFFERED, f"{module or PACKAGE} imports {names - OFFERED} from the package"


def test_only_xdit_imports_xdit() -> None:
    hosted = {module for module, file in FILES.items() if {name.split(".")[0] for name in imports(file)} & HOSTS}
    wrong = sorted(module for module in hosted if module.split(".")[0] != "xdit")
    assert not wrong, f"{', '.join(wrong)} know xDiT"


def test_every_wing_exists_and_says_what_it_is() -> None:
    folders = {path.stem for path in FOLDER.iterdir()} - {"__pycache__", "__init__", *DOORS}
    assert folders == {wing.split(".")[0] for wing in WINGS}
    assert {module for module in FILES if wing(module) is None} == {*DOORS, "xdit"}
    for each in ("xdit", *WINGS):
        told = ast.get_docstring(ast.parse(FILES[each].read_text()))
        _, comes_in, goes_out = told.splitlines()[:3]
        assert comes_in.startswith("In: ") and goes_out.startswith("Out: "), f"{each} does not say what it is"
        for name in re.findall(r"`([\w.]+)`", goes_out):
            assert exists(f"{each}.{name}"), f"{each} has no {name}"


def exists(name: str) -> bool:
    """Whether there is such a module, or a module that defines such a name."""
    module, _, symbol = name.rpartition(".")
    defined = rf"^(?:(?:def|class) {symbol}\b|{symbol}\b.*=)"
    return name in FILES or (module in FILES and bool(re.search(defined, FILES[module].read_text(), re.MULTILINE)))
