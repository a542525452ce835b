"""Patches of a host package: checked together, applied all or none, and restored by a sweep over all modules.

Patches of a feature that the plugin can do without are left out where one of them does not fit the host.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
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
    condition: Callable[[], Any] | None = None
    """Returns whether the installed host needs the patch; None where any does."""
    on_activation: bool = False
    """Whether the patch is applied only once the plugin is activated, rather than when its module is imported."""
    in_layers: bool = False
    """Whether it acts in each layer, and may be suspended; see :meth:`PatchSet.switch_layers`."""
    feature: str | None = None
    """What is off if the host does not fit; None if without the patch the plugin cannot work, or results are wrong."""

    @property
    def name(self) -> str:
        """Full name of the symbol."""
        return f"{self.module}.{self.symbol}"

    @property
    def is_needed(self) -> bool:
        """Whether the installed host needs the patch."""
        return self.condition is None or bool(self.condition())

    def problem(self) -> str | None:
        """Return why the patch does not fit the installed host, whose module is imported; None if it fits."""
        parameters = symbol_lookup.find_parameters(self.module, self.symbol)
        if parameters is None:
            error = symbol_lookup.import_error(self.module)
            return f"{self.module} cannot be imported ({error})" if error else f"{self.name} does not exist"
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
    """Patches that are applied all or none, but for features that are off: some once their module has been executed,
    and those with `on_activation` once the plugin is activated."""

    patches: Sequence[Patch]
    """All patches, also those that only require a symbol."""
    package: str
    """Top-level package of the host, whose modules may hold copies of the replaced functions."""
    is_active: bool = False
    """Whether the plugin is activated."""
    is_removed: bool = False
    """Whether the set was uninstalled: modules whose import is still running get no patches any more."""
    host_runs_in_layers: bool = False
    """Whether the patches that act in each layer are suspended."""
    off: dict[str, str] = field(default_factory=dict)
    """Features that are off, each with the reason."""
    applied: list[_AppliedPatch] = field(default_factory=list)
    """Patches that are applied, in their order."""
    holders: list[weakref.ref] = field(default_factory=list)
    """Objects other than modules that may hold functions of the host as attributes."""

    def install(self) -> None:
        """Apply the patches without `on_activation`: now if their module is loaded, else once it is."""
        modules = {patch.module for patch in self.patches if not patch.on_activation}
        for module in sorted(modules & sys.modules.keys()):
            self._apply_to(module)
        if modules - sys.modules.keys() and not self.is_removed:
            sys.meta_path.insert(0, self)

    def activate(self, holders: Iterable[Any] = ()) -> None:
        """Apply all patches, to a host that may have run without those with `on_activation`.

        Args:
            holders: objects that may hold functions of the host as attributes.

        Raises:
            RuntimeError: a patch that the plugin needs does not fit the host, and the whole set is removed; or it was
                removed before.
        """
        if self.is_removed:
            raise RuntimeError("CoCoDiff's patches of xDiT were removed because of an error")
        if not self.is_active:
            try:
                self._apply(self.patches)
            except Exception:
                self.uninstall()
                raise
            self.is_active = True
            _active.append(self)
        known = {id(each()) for each in self.holders}
        added = [weakref.ref(holder) for holder in holders if id(holder) not in known]
        self.holders += added
        in_steps = [done for done in self.applied if done.patch.on_activation]
        _replace([vars(each()) for each in added], [(done, done.original, done.replacement) for done in in_steps])

    def switch_layers(self, is_on: bool) -> None:
        """Let the patches that act in each layer have effect, or the host's own functions run there meanwhile."""
        self.host_runs_in_layers = not is_on
        changes = [
            (done, *((done.original, done.replacement) if is_on else (done.replacement, done.original)))
            for done in self.applied
            if done.patch.in_layers
        ]
        for done, _, new in changes:
            setattr(done.owner, done.attribute, new)
        self._replace_copies(changes)

    def uninstall(self) -> None:
        """Restore every symbol, in reverse order, and all copies of it in modules and holders."""
        self.is_removed = True
        _active[:] = [each for each in _active if each is not self]
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        undone = self.applied[::-1]
        self.applied.clear()
        for done in undone:
            setattr(done.owner, done.attribute, done.original)
        self._replace_copies([(done, done.replacement, done.original) for done in undone])
        self.holders.clear()

    def is_applied(self, patch: Patch) -> bool:
        """Return whether a patch is applied."""
        return any(done.patch is patch for done in self.applied)

    def _apply_to(self, module: str) -> None:
        """Apply the patches of a module that has been executed.

        An error removes the whole set. It is logged rather than raised, since it must not break the host's import.
        """
        if self.is_removed:
            return
        try:
            self._apply([patch for patch in self.patches if patch.module == module and not patch.on_activation])
        except Exception as error:
            self.uninstall()
            warn_once(f"the plugin is not installed, and xDiT runs unchanged: {type(error).__name__}: {error}")

    def _apply(self, patches: Sequence[Patch]) -> None:
        """Check patches, and apply those that are needed, without the features that are off.

        Raises:
            RuntimeError: a patch without a feature does not fit the host; none is applied.
        """
        needed = [patch for patch in patches if not self.is_applied(patch) and patch.is_needed]
        problems = [(patch.feature, problem) for patch in needed if (problem := patch.problem())]
        if required := [problem for feature, problem in problems if feature is None]:
            raise RuntimeError(f"{'; '.join(required)}; install a tested version of {self.package}")
        self.off |= problems
        before = len(self.applied)
        for patch in needed:
            # A check may have imported the module, and with it applied the patch.
            if patch.replace and patch.feature not in self.off and not self.is_applied(patch):
                self._replace_symbol(patch, patch.replace)
        self._replace_copies([(done, done.original, done.replacement) for done in self.applied[before:]])

    def _replace_symbol(self, patch: Patch, replace: Callable[[Any], Any]) -> None:
        owner, attribute, original = symbol_lookup.find_symbol(patch.module, patch.symbol)
        # From the dict of the class, so that a staticmethod remains one.
        original = vars(owner)[attribute] if isinstance(owner, type) else original
        replacement = replace(original)
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
        if not any(patch.module == name and not patch.on_activation for patch in self.patches):
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
            execute(module)
            self._apply_to(module.__name__)

        loader.exec_module = exec_module


_active: list[PatchSet] = []
"""The sets that are activated."""


def switch_layers(is_on: bool) -> None:
    """Let the plugin act in the layers, or the host's own functions run there; see :meth:`PatchSet.switch_layers`."""
    for each in _active:
        each.switch_layers(is_on)


def host_runs_in_layers() -> bool:
    """Return whether the host's own functions run in the layers."""
    return any(each.host_runs_in_layers for each in _active)


def _replace(namespaces: Iterable[dict[str, Any]], changes: Sequence[tuple[_AppliedPatch, Any, Any]]) -> None:
    """Replace functions in namespaces: for each applied patch, what to replace and by what."""
    # None and other shared values appear in modules without being copies.
    is_copy = {id(old): new for done, old, new in changes if callable(old) and not isinstance(done.owner, type)}
    for namespace in namespaces if is_copy else ():
        for key, value in list(namespace.items()):
            while id(value) in is_copy and is_copy[id(value)] is not value:  # a later patch may replace the replacement
                namespace[key] = value = is_copy[id(value)]
