"""The patch mechanism: rows that say what is replaced, checked as a whole, applied all or none, taken back by sweep."""

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
    """One site of the host that the plugin replaces, or calls."""

    module: str
    symbol: str
    """Dotted path inside the module."""
    why: str
    replace: Callable[[Any], Any] | None
    """Makes the replacement from the original; None where the plugin uses it as it is, and it only has to be there."""
    parameters: tuple[str, ...] | None = None
    """Parameters that the original must have, in this order; None where the replacement does not care."""
    used_names: tuple[str, ...] = ()
    """Names that the module has to use: of attributes that it sets, which no source declares."""
    unless_present: tuple[str, str] | None = None
    """Module and symbol of a host that does of itself what this row is for."""
    import_context: Callable[[], AbstractContextManager[None]] | None = None
    """What the module runs in, where that has to see another machine."""
    on_activation: bool = False
    """Whether it is applied only once the plugin is asked for."""

    @property
    def name(self) -> str:
        return f"{self.module}.{self.symbol}"

    @property
    def needed(self) -> bool:
        """Whether the installed host lacks what this row adds."""
        return self.unless_present is None or symbol_lookup.find_symbol(*self.unless_present) is None

    def problem(self) -> str | None:
        """What keeps this row from fitting the installed host, found without importing it."""
        found = symbol_lookup.find_symbol(self.module, self.symbol)
        if found is None:
            return f"{self.name} does not exist"
        if self.parameters is not None and found != self.parameters:
            return f"{self.name} takes ({', '.join(found)}), expected ({', '.join(self.parameters)})"
        missing = [name for name in self.used_names if not symbol_lookup.uses_name(self.module, name)]
        return f"{self.module} does not use {', '.join(missing)}" if missing else None


@dataclass
class _Applied:
    patch: Patch
    owner: Any
    attribute: str
    original: Any
    replacement: Any


@dataclass
class PatchSet:
    """Patches that are applied together or not at all. A patch is applied once its module has run; one with
    `on_activation` waits until the plugin is activated too."""

    rows: Sequence[Patch]
    package: str
    """Top-level package whose modules may hold copies of the replaced functions."""
    is_active: bool = False
    """Whether the plugin is asked for, so that rows that are `on_activation` are applied."""
    applied: list[_Applied] = field(default_factory=list)
    given: list[tuple[weakref.ref, str, _Applied]] = field(default_factory=list)
    """Attributes of other objects that were replaced."""
    withdrawn: bool = False
    """Whether the set was taken back: modules whose import is under way must not get their rows any more."""
    needed: list[Patch] = field(init=False)
    """Rows to apply: not those whose work the host does itself, nor those that replace nothing."""

    def __post_init__(self) -> None:
        self.needed = [row for row in self.rows if (row.replace or row.import_context) and row.needed]

    def problems(self) -> list[str]:
        """Why the set cannot be applied to the installed host; empty when it can."""
        checked = [*self.needed, *(row for row in self.rows if row.replace is None and row.import_context is None)]
        return [problem for row in checked if (problem := row.problem())]

    def install(self) -> None:
        """Apply rows whose modules are loaded, and watch the import of the others."""
        self._apply_loaded()
        if len(self.applied) < len(self.needed) and not self.withdrawn:
            sys.meta_path.insert(0, self)

    def activate(self, objects: Iterable[Any] = ()) -> None:
        """Apply the rows that are `on_activation`, in a host that may have run without them.

        Args:
            holders: objects that may keep the host's functions as attributes.

        Raises:
            RuntimeError: the set was taken back because of an error, which has been reported.
        """
        if not self.is_active:
            self.is_active = True
            self._apply_loaded()
        if self.withdrawn:
            raise RuntimeError("CoCoDiff's patches of xDiT were taken back")
        functions = [done for done in self.applied if done.patch.on_activation and not isinstance(done.owner, type)]
        for holder in objects:
            for done in functions:
                names = _exchange(holder, done.original, done.replacement)
                self.given.extend((weakref.ref(holder), name, done) for name in names)

    def uninstall(self) -> None:
        """Restore every site, in reverse, the copies that modules took of it, and what holders were given."""
        self.withdrawn = True
        for reference, name, done in self.given:
            holder = reference()
            if holder is not None and getattr(holder, name, None) is done.replacement:
                setattr(holder, name, done.original)
        self.given.clear()
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        while self.applied:
            done = self.applied.pop()
            setattr(done.owner, done.attribute, done.original)
            self._sweep(done, done.replacement, done.original)

    def _apply_loaded(self) -> None:
        for name in dict.fromkeys(row.module for row in self.needed):
            if name in sys.modules:
                self.apply(sys.modules[name])

    def apply(self, module: ModuleType) -> None:
        """Apply the rows of a module that has run. An error takes back the whole set, and is reported, not raised:
        it is ours, and no reason for the host not to be imported."""
        try:
            for row in self.needed:
                is_due = (self.is_active or not row.on_activation) and not self.withdrawn and not self.is_applied(row)
                if row.module == module.__name__ and is_due:
                    self._apply(row, module)
        except Exception as error:
            self.uninstall()
            warn_once(f"the plugin is not installed, and xDiT runs unchanged: {type(error).__name__}: {error}")

    def is_applied(self, row: Patch) -> bool:
        """Whether a row is applied."""
        return any(done.patch is row for done in self.applied)

    def _apply(self, row: Patch, module: ModuleType) -> None:
        *path, attribute = row.symbol.split(".")
        owner: Any = module
        for part in path:
            owner = getattr(owner, part)
        # Through the class dict, so that a staticmethod is kept as one.
        original = vars(owner)[attribute] if isinstance(owner, type) else getattr(owner, attribute)
        replacement = row.replace(original) if row.replace else original
        setattr(owner, attribute, replacement)
        self.applied.append(done := _Applied(row, owner, attribute, original, replacement))
        self._sweep(done, original, replacement)

    def _sweep(self, done: _Applied, old: Any, new: Any) -> None:
        """Replace copies that modules made with ``from ... import``: modules of the host, and for rows that are
        `on_activation` any module, since scripts may have run before."""
        if isinstance(done.owner, type) or not callable(old):
            return  # None and other shared values stand in places that are not copies
        for name, module in list(sys.modules.items()):
            is_hosts = name == "__main__" or name.partition(".")[0] == self.package
            if is_hosts or (done.patch.on_activation and isinstance(module, ModuleType)):
                _exchange(module, old, new)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Part of the import system: have the rows of a module applied right after it has run."""
        if not any(row.module == name for row in self.needed):
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
            around = [row.import_context for row in self.needed if row.module == module.__name__ and row.import_context]
            with ExitStack() as stack:
                for enter in [] if self.withdrawn else around:
                    stack.enter_context(enter())
                execute(module)
            self.apply(module)

        loader.exec_module = exec_module


def _exchange(owner: Any, old: Any, new: Any) -> list[str]:
    """Replace an object by another one among the attributes of `owner` itself, and return the names of these."""
    names = [name for name, value in vars(owner).items() if value is old]
    for name in names:
        setattr(owner, name, new)
    return names
