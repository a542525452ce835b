"""Entry points that install the plugin.

PyTorch calls :func:`watch` at the end of ``import torch`` (group ``torch.backends``). An xDiT with the series in
``patches/`` calls :func:`plug_in` at the start of ``import xfuser`` (group ``xfuser.plugins``).

The first one must take almost no time and never raise, so it only adds a finder of the standard library; the plugin
itself is loaded when xDiT is imported. The first call that installs or uninstalls the plugin counts: later entry points
do nothing.
"""

import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

_decided = False
"""Whether the plugin has been installed or uninstalled."""


class XDiTWatch:
    """Finder that installs the plugin when xDiT is imported, and then removes itself from sys.meta_path."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Install the plugin if `name` is xDiT or a part of it, and find the module with the other finders."""
        if name.partition(".")[0] == "xfuser":
            unwatch()
            _install()
            # The finder of the plugin is first now, and has not been called for this module yet.
            specs = (finder.find_spec(name, path, target) for finder in list(sys.meta_path))
            return next(filter(None, specs), None)
        return None


def watch() -> None:
    """Install the plugin as soon as xDiT is imported, unless COCODIFF_DISABLE is set."""
    # If xDiT imports torch, its import is running already: so the imports of its parts are watched too.
    if _undecided():
        sys.meta_path.insert(0, XDiTWatch())


def plug_in() -> None:
    """Install the plugin into the xDiT that is being imported, unless COCODIFF_DISABLE is set."""
    if _undecided():
        unwatch()
        _install()


def unwatch() -> None:
    """Remove the finder and disable the entry points.

    An explicit installation or removal of the plugin calls this first, since looking for xDiT would trigger them.
    """
    global _decided
    _decided = True
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, XDiTWatch)]


def _undecided() -> bool:
    return not _decided and os.environ.get("COCODIFF_DISABLE", "").lower() in ("", "0", "false", "no", "off")


def _install() -> None:
    # No error in the plugin may break the import of xDiT.
    try:
        from xfuser_cocodiff import install

        install()
    except Exception as error:
        print(
            f"cocodiff: the plugin is not installed, and xDiT runs unchanged: {type(error).__name__}: {error}",
            file=sys.stderr,
        )
