"""Patches of a host package: checked together, applied all or none, and restored by a sweep over all modules.

Patches of a feature that the plugin can do without are left out where one of them does not fit the host.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from xfuser_cocodiff.xdit.patching import symbol_lookup
from xfuser_cocodiff.xdit.patching.log import warn_once


@dataclass(frozen=True)
class Patch:
    """One symbol of a host that the plugin replaces, or requires."""

    module: str
    """Module of the symbol."""
    symbol: str
    """Dotted path inside the module."""
    why: str
    """Reason for the patch, as the record of `cocodiff env` has it."""
    replace: Callable[[Any], Any] | None
    """Function that makes the replacement from the original; None if the symbol only has to exist."""
    parameters: tuple[str, ...] | None = None
    """Parameters that the original must have, in this order; None allows any."""
    unless_present: tuple[str, str] | None = None
    """Module and symbol of a host that needs no such patch."""
    import_context: Callable[[], AbstractContextManager[None]] | None = None
    """Context in which the module is executed, if its import has to see a different environment."""
    on_activation: bool = False
    """Whether the patch is applied only once the plugin is activated."""
    feature: str | None = None
    """What is off if the host does not fit; None if without the patch the plugin cannot work, or results are wrong."""

    @property
    def name(self) -> str:
        """Full name of the symbol."""
        return f"{self.module}.{self.symbol}"

    @property
    def is_needed(self) -> bool:
        """Whether the installed host needs the patch."""
        return self.unless_present is None or symbol_lookup.find_symbol(*self.unless_present) is None

    def problem(self) -> str | None:
        """Return why the patch does not fit the installed host, without importing it; None if it fits."""
        parameters = symbol_lookup.find_symbol(self.module, self.symbol)
        if parameters is None:
            return f"{self.name} does not exist"
        if self.parameters is not None and parameters != self.parameters:
            return f"{self.name} takes ({', '.join(parameters)}), expected ({', '.join(self.parameters)})"
        return None


@dataclass
class _AppliedPatch:
    patch: Patch
    owner: Any
    attribute: str
    original: Any
    replacement: Any


_WITHOUT_COPIES = {"torch", "transformers", "numpy", "scipy", "sympy"}
"""Large packages that never import the host, and are not searched for copies of its functions.

The standard library is searched: a module of the user may have the name of one of its modules.
"""


@dataclass
class PatchSet:
    """Patches that are applied all or none, but for features that are off, each once its module has been executed;
    those with `on_activation` wait until the plugin is activated too."""

    patches: Sequence[Patch]
    """All patches, also those that only require a symbol."""
    package: str
    """Top-level package of the host, whose modules may hold copies of the replaced functions."""
    is_active: bool = False
    """Whether the plugin is activated."""
    applied: list[_AppliedPatch] = field(default_factory=list)
    """Patches that are applied, in their order."""
    holders: list[weakref.ref] = field(default_factory=list)
    """Objects other than modules that may hold functions of the host as attributes."""
    is_removed: bool = False
    """Whether the set was uninstalled: modules whose import is still running get no patches any more."""
    needed: list[Patch] = field(init=False)
    """Patches to apply: those that replace something which the host needs, without features that are off."""
    off: dict[str, str] = field(init=False)
    """Features that are off, each with the reason."""

    def __post_init__(self) -> None:
        checked = [each for each in self.patches if each.is_needed]
        self.off = {each.feature: problem for each in checked if each.feature and (problem := each.problem())}
        replacing = [each for each in checked if each.replace or each.import_context]
        self.needed = [each for each in replacing if each.feature not in self.off]

    def problems(self) -> list[str]:
        """Return why the set does not fit the installed host; an empty list if it fits."""
        required = [each for each in self.patches if each.feature is None and each.is_needed]
        return [problem for each in required if (problem := each.problem())]

    def install(self) -> None:
        """Apply the patches of loaded modules, and watch the import of the others."""
        self._apply_to_loaded()
        if len(self.applied) < len(self.needed) and not self.is_removed:
            sys.meta_path.insert(0, self)

    def activate(self, holders: Iterable[Any] = ()) -> None:
        """Apply the patches with `on_activation`, to a host that may have run without them.

        Args:
            holders: objects that may hold functions of the host as attributes.

        Raises:
            RuntimeError: the set was removed because of an error, which has been logged.
        """
        if not self.is_active:
            self.is_active = True
            self._apply_to_loaded()
        if self.is_removed:
            raise RuntimeError("CoCoDiff's patches of xDiT were removed because of an error")
        known = {id(each()) for each in self.holders}
        added = [weakref.ref(holder) for holder in holders if id(holder) not in known]
        self.holders += added
        in_steps = [done for done in self.applied if done.patch.on_activation]
        _replace([vars(each()) for each in added], [(done, done.original, done.replacement) for done in in_steps])

    def uninstall(self) -> None:
        """Restore every symbol, in reverse order, and all copies of it in modules and holders."""
        self.is_removed = True
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        undone = self.applied[::-1]
        self.applied.clear()
        for done in undone:
            setattr(done.owner, done.attribute, done.original)
        self._replace_copies([(done, done.replacement, done.original) for done in undone])
        self.holders.clear()

    def _apply_to_loaded(self) -> None:
        self._apply_to([sys.modules[patch.module] for patch in self.needed if patch.module in sys.modules])

    def apply(self, module: ModuleType) -> None:
        """Apply the patches of a module that has been executed.

        An error removes the whole set. It is logged rather than raised, since it must not break the host's import.
        """
        self._apply_to([module])

    def _apply_to(self, modules: list[ModuleType]) -> None:
        applied_before = len(self.applied)
        try:
            for module in modules:
                for patch in [patch for patch in self.needed if patch.module == module.__name__]:
                    is_due = (self.is_active or not patch.on_activation) and not self.is_removed
                    if is_due and not self.is_applied(patch):
                        self._apply(patch, module)
            self._replace_copies([(done, done.original, done.replacement) for done in self.applied[applied_before:]])
        except Exception as error:
            self.uninstall()
            warn_once(f"the plugin is not installed, and xDiT runs unchanged: {type(error).__name__}: {error}")

    def is_applied(self, patch: Patch) -> bool:
        """Return whether a patch is applied."""
        return any(done.patch is patch for done in self.applied)

    def _apply(self, patch: Patch, module: ModuleType) -> None:
        *path, attribute = patch.symbol.split(".")
        owner: Any = module
        for part in path:
            owner = getattr(owner, part)
        # From the dict of the class, so that a staticmethod remains one.
        original = vars(owner)[attribute] if isinstance(owner, type) else getattr(owner, attribute)
        replacement = patch.replace(original) if patch.replace else original
        setattr(owner, attribute, replacement)
        self.applied.append(_AppliedPatch(patch, owner, attribute, original, replacement))

    def _replace_copies(self, changes: list[tuple[_AppliedPatch, Any, Any]]) -> None:
        """Replace copies that modules made by ``from ... import``: modules of the host, and for patches with
        `on_activation` any module, since scripts may have been executed before.

        Args:
            changes: applied patches, each with the function to replace and the function that replaces it.
        """
        in_steps = [change for change in changes if change[0].patch.on_activation]
        for name, module in list(sys.modules.items()) if changes else ():
            package = name.partition(".")[0]
            if package not in _WITHOUT_COPIES and isinstance(module, ModuleType):
                _replace([vars(module)], changes if package in ("__main__", self.package) else in_steps)
        _replace([vars(holder) for each in self.holders if (holder := each()) is not None], in_steps)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module as part of the import system, and have its patches applied once it has been executed."""
        if not any(patch.module == name for patch in self.needed):
            return None
        for finder in list(sys.meta_path):
            if finder is not self and (spec := finder.find_spec(name, path, target)):
                self._apply_after_execution(spec)
                return spec
        return None

    def _apply_after_execution(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            patches = [] if self.is_removed else [each for each in self.needed if each.module == module.__name__]
            with ExitStack() as stack:
                for patch in patches:
                    if patch.import_context:
                        stack.enter_context(patch.import_context())
                execute(module)
            self.apply(module)

        loader.exec_module = exec_module


def _replace(namespaces: Iterable[dict[str, Any]], changes: Sequence[tuple[_AppliedPatch, Any, Any]]) -> None:
    """Replace functions in namespaces: for each applied patch, what to replace and by what."""
    # None and other shared values appear in modules without being copies.
    is_copy = {id(old): new for done, old, new in changes if callable(old) and not isinstance(done.owner, type)}
    for namespace in namespaces if is_copy else ():
        for key, value in list(namespace.items()):
            while id(value) in is_copy and is_copy[id(value)] is not value:  # a later patch may replace the replacement
                namespace[key] = value = is_copy[id(value)]
