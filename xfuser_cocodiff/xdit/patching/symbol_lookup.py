"""Lookup of a host's symbols, which imports their modules, and digests of functions by their source."""

import ast
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any


def find_symbol(module: str, symbol: str) -> tuple[Any, str, Any] | None:
    """Return the owner of a symbol, its attribute and its value; None if the module or the symbol does not exist.

    Args:
        module: module of the symbol, which is imported.
        symbol: dotted path inside the module.
    """
    *path, attribute = symbol.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for part in path:
            owner = getattr(owner, part)
        return owner, attribute, getattr(owner, attribute)
    except Exception:  # of any type, from the execution of a module
        return None


def import_error(module: str) -> str | None:
    """Return why a module cannot be imported; None if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # of any type, from the execution of the module
        return f"{type(error).__name__}: {error}"
    return None


def without(module: str, symbol: str) -> Callable[[], bool]:
    """Return a condition for patches: whether the host has no such symbol, by which it would need no patch."""
    return lambda: find_symbol(module, symbol) is None


def find_parameters(module: str, symbol: str) -> tuple[str, ...] | None:
    """Return the names of a function's parameters; none for any other symbol, and None if it does not exist."""
    found = find_symbol(module, symbol)
    if found is None:
        return None
    return tuple(inspect.signature(found[2]).parameters) if inspect.isfunction(found[2]) else ()


@cache
def source_digest(module: str, symbol: str) -> str | None:
    """Return a hash of a function by its source, without comments, docstrings and formatting.

    It is the same in every version of Python, and that of the original where the function is patched. None if the
    function does not exist.
    """
    found = find_symbol(module, symbol)
    function = inspect.unwrap(found[2]) if found else None
    if not inspect.isfunction(function):
        return None
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return hashlib.sha256(repr([_plain(tree.body[0])]).encode()).hexdigest()[:16]


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
