"""Patch that speeds up Triton's interpreter."""

import functools
from collections.abc import Callable
from typing import Any


def patch_language_once_per_launch() -> None:
    """Let a launch patch Triton's language once, and not again at each call of a device function.

    There the patches are in place already; to find that out takes two fifths of a launch.
    """
    from triton import language
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # another version, which stays as it is
        return
    patch, in_force = interpreter._patch_lang, set()

    @functools.cache
    def languages(function: Callable) -> frozenset[int]:
        used = {id(value) for value in function.__globals__.values()}
        return frozenset(id(module) for module in (language, language.core) if id(module) in used)

    def patch_missing(function: Callable) -> Any:
        if languages(function) and languages(function) <= in_force:
            return interpreter._LangPatchScope()
        scope, is_launch = patch(function), not in_force
        in_force.update(languages(function))
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (in_force.clear(), restore())
        return scope

    interpreter._patch_lang = patch_missing
