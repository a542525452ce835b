"""Lookup of symbols without importing their modules, so that patches are checked before any is applied."""

import ast
import hashlib
import importlib.util
import inspect
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


def find_symbol(module: str, symbol: str) -> tuple[str, ...] | None:
    """Return the parameter names of a symbol, as :func:`source_parameters`, from the module itself if it is loaded."""
    loaded = sys.modules.get(module)
    return runtime_parameters(loaded, symbol) if loaded else source_parameters(module, symbol)


def source_parameters(module: str, symbol: str) -> tuple[str, ...] | None:
    """Return the parameter names of a symbol as its source declares them.

    Returns:
        The names of a function or method, an empty tuple for any other symbol, and None if the module or the symbol
        does not exist.
    """
    node = _declaration(module, symbol)
    if not isinstance(node, ast.FunctionDef):
        return None if node is None else ()
    signature = node.args
    arguments = [*signature.posonlyargs, *signature.args, signature.vararg, *signature.kwonlyargs, signature.kwarg]
    return tuple(argument.arg for argument in arguments if argument)


@cache
def source_digest(module: str, symbol: str) -> str | None:
    """Return a hash of a function by its source, without comments, docstrings and formatting.

    It is the same in every version of Python. None if the function does not exist.
    """
    node = _declaration(module, symbol)
    if not isinstance(node, ast.FunctionDef):
        return None
    return hashlib.sha256(repr([_plain(node)]).encode()).hexdigest()[:16]


def _declaration(module: str, symbol: str) -> ast.AST | None:
    """Return the statement that declares a symbol; None if there is none.

    Of a dotted path beyond classes (an attribute of an instance) only the first part is looked up, since no source
    declares the rest. Special methods of a dataclass are declared by their class.
    """
    node: ast.AST | None = _tree(module)
    for part in symbol.split("."):
        if not isinstance(node, ast.Module | ast.ClassDef):
            break
        found = _find(node.body, part)
        if found is None and not _generates(node, part):
            return None
        node = found or node
    return node


def uses_name(module: str, name: str) -> bool:
    """Return whether the source of a module uses a name, as a variable, an attribute or a string."""
    tree = _tree(module)
    nodes = ast.walk(tree) if tree else ()
    return any(
        name in (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "value", None)) for node in nodes
    )


def _plain(value: Any) -> Any:
    """Return a syntax tree as nested tuples, without positions and docstrings."""
    if isinstance(value, list):
        return tuple(_plain(item) for item in value)
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = dict(ast.iter_fields(value))
    if isinstance(value, ast.FunctionDef) and ast.get_docstring(value, clean=False) is not None:
        fields["body"] = fields["body"][1:]
    # Versions of Python differ in their empty fields.
    filled = ((name, _plain(field)) for name, field in fields.items() if field not in (None, []) and name != "ctx")
    return type(value).__name__, *filled


def runtime_parameters(module: ModuleType, symbol: str) -> tuple[str, ...] | None:
    """Return the parameter names of a symbol, as :func:`source_parameters`, from a loaded module."""
    value: object = module
    for part in symbol.split("."):
        if not hasattr(value, part):
            return None
        value = getattr(value, part)
    return tuple(inspect.signature(value).parameters) if inspect.isfunction(value) else ()


def _find(body: list[ast.stmt], name: str) -> ast.stmt | None:
    for statement in body:
        for node in _flatten(statement):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return node
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return node
            if isinstance(node, ast.Import | ast.ImportFrom) and any(
                (alias.asname or alias.name) == name for alias in node.names
            ):
                return node
    return None


def _generates(owner: ast.AST, name: str) -> bool:
    """Return whether `name` is a special method of a dataclass, which no source declares."""
    return (
        isinstance(owner, ast.ClassDef)
        and name.startswith("__")
        and "dataclass" in map(ast.unparse, owner.decorator_list)
    )


def _flatten(statement: ast.stmt) -> list[ast.stmt]:
    """Return the statement itself, or the statements inside of an `if` or `try`."""
    if isinstance(statement, ast.If | ast.Try):
        return [inner for part in (statement.body, statement.orelse) for s in part for inner in _flatten(s)]
    return [statement]


@cache
def _tree(module: str) -> ast.Module | None:
    root, *rest = module.split(".")
    spec = importlib.util.find_spec(root) if root != "__main__" else None
    if spec is None or not spec.submodule_search_locations:
        return None
    for location in spec.submodule_search_locations:
        path = Path(location, *rest)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
    return None
