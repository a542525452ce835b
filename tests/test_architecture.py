"""Imports have one direction between floors, packages and files, and three places import the host.

Nothing imports `benchmarks`.
"""

import ast
import functools
import re
import runpy
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

PACKAGE = "xfuser_cocodiff"
FOLDER = Path(__file__).parent.parent / PACKAGE
BENCHMARKS = FOLDER.parent / "benchmarks"
"""Not in the wheel."""
PICTURE = runpy.run_path(str(FOLDER.parent / "docs/pictures/packages.py"))["FLOORS"]
FLOORS = {floor: packages for floor, (_, _, packages) in reversed(PICTURE.items()) if packages}
"""Packages of each floor, lowest first, as in the picture."""
PACKAGES = (*(f"{floor}.{package}" for floor, packages in FLOORS.items() for package in packages), "cli", "benchmarks")
"""All packages, lowest first: a package may import itself and those before it."""
ENTRY_POINTS = {"": {"engine", "xdit", "tools"}, "auto": {""}, "autoload": {""}}
"""Top-level modules ("" is the package itself) and the modules that each may import."""
PUBLIC = {"__version__", "install", "autoload"}
"""Names that floors may import from the top-level modules."""
HOSTS = {"xfuser", "yunchang"}
IMPORT_HOSTS = ("xdit.", "tools.launching.", "benchmarks.")
"""Where the host is imported: in its integration, and where tools or benchmarks launch it."""


def name_of(file: Path) -> str:
    """Return the module name of a file, without the package's name."""
    parts = file.relative_to(FOLDER if file.is_relative_to(FOLDER) else FOLDER.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for root in (FOLDER, BENCHMARKS) for file in sorted(root.rglob("*.py"))}


@functools.cache
def imports(file: Path) -> set[str]:
    """Return the modules and names that a file imports, anywhere in it."""
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    return imported


def modules(file: Path) -> set[str]:
    """Return the modules of ours that a file imports; other imported names stand for their module."""
    ours = {name for name in imports(file) if name.split(".")[0] in (PACKAGE, BENCHMARKS.name)}
    own = {name.removeprefix(PACKAGE).lstrip(".") for name in ours}
    return {name if name in FILES else name.rpartition(".")[0] for name in own} - {""}


def package_of(module: str) -> str | None:
    """Return the package of a module; None for top-level modules and floors."""
    return next((name for name in PACKAGES if module == name or module.startswith(f"{name}.")), None)


IMPORTS = {module: modules(file) for module, file in FILES.items()}


def test_packages_import_in_one_direction() -> None:
    wrong = []
    for module, targets in IMPORTS.items():
        for target in targets - set(ENTRY_POINTS):
            own, other = package_of(module), package_of(target)
            if module in ENTRY_POINTS:
                is_allowed = target.split(".")[0] in ENTRY_POINTS[module]
            else:
                is_allowed = None not in (own, other) and PACKAGES.index(other) <= PACKAGES.index(own)
            if not is_allowed:
                wrong.append(f"{module} imports {target}, which is above it")
    assert not wrong, "\n".join(wrong)


def test_files_of_a_package_import_in_one_direction() -> None:
    cycles = []
    for each in PACKAGES:
        inside = {module for module in FILES if package_of(module) == each}
        try:
            TopologicalSorter({module: IMPORTS[module] & inside for module in inside}).prepare()
        except CycleError as error:
            [*_, cycle] = error.args
            cycles += [f"{importer} imports {imported}" for imported, importer in pairwise(cycle)]
    assert not cycles, "import cycle: " + ", ".join(cycles)


def test_only_public_names_of_entry_points_are_imported() -> None:
    for module, file in FILES.items():
        taken = {name.partition(".")[2] for name in imports(file) if name.rpartition(".")[0] == PACKAGE}
        names = {name for name in taken if name in ENTRY_POINTS or name not in FILES} - {*FLOORS, "cli"}
        assert names <= PUBLIC, f"{module or PACKAGE} imports {names - PUBLIC} from the package"


def test_only_xdit_launching_and_benchmarks_import_the_host() -> None:
    importing = {module for module, file in FILES.items() if {name.split(".")[0] for name in imports(file)} & HOSTS}
    wrong = sorted(module for module in importing if not module.startswith(IMPORT_HOSTS))
    assert not wrong, f"{', '.join(wrong)} import xfuser or yunchang"


def test_every_package_is_listed_and_described() -> None:
    present = {path.relative_to(FOLDER).parts[0].removesuffix(".py") for path in FOLDER.rglob("*.py")}
    folders = present - {"__init__", *ENTRY_POINTS}
    assert folders == {*FLOORS, "cli"}
    assert {module for module in FILES if package_of(module) is None} == {*ENTRY_POINTS, *FLOORS}
    for each in (*FLOORS, *PACKAGES):
        described = ast.get_docstring(ast.parse(FILES[each].read_text()))
        assert len(described.splitlines()) >= 3, f"{each} is not described in three lines"
        public = re.search(r"^Public: (.*?)(?:\n\n|\Z)", described, re.DOTALL | re.MULTILINE)
        assert public or each in FLOORS, f"{each} names nothing as public"
        for symbol in re.findall(r"`([\w.]+)`", public[1]) if public else ():
            assert exists(f"{each}.{symbol}"), f"{each} has no {symbol}"


def exists(name: str) -> bool:
    """Return whether a module exists, or defines a name at its top level."""
    module, _, symbol = name.rpartition(".")
    defined = rf"^(?:(?:def|class) {symbol}\b|{symbol}\b.*=)"
    return name in FILES or (module in FILES and bool(re.search(defined, FILES[module].read_text(), re.MULTILINE)))


def test_every_claim_has_tests() -> None:
    folder = Path(__file__).parent
    named = set(re.findall(r"`([a-z0-9_/]+\.py)`", (folder / "claims.md").read_text()))
    assert len(named) > 40 and not [name for name in named if not (folder / name).is_file()]
