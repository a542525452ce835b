"""The entry points: one that PyTorch calls at the end of ``import torch`` (group ``torch.backends``), and one that an
xDiT with the series in ``patches/`` calls at the start of ``import xfuser`` (group ``xfuser.plugins``).

The first must cost next to nothing and never raise, so it only leaves a standard-library finder behind; the plugin
itself is loaded when somebody imports xDiT. Whoever installs or uninstalls the plugin first decides: entry points that
come later do nothing.
"""

import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

_decided = False
"""Whether the plugin has been installed or kept out."""


class XDiTWatch:
    """Sits first in sys.meta_path until xDiT is looked for, installs the plugin, and leaves."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] == "xfuser":
            unwatch()
            _install()
            # What was installed comes first now, and has not been asked for this module yet.
            specs = (finder.find_spec(name, path, target) for finder in list(sys.meta_path))
            return next(filter(None, specs), None)
        return None


def watch() -> None:
    """Install the plugin as soon as xDiT is imported, unless COCODIFF_DISABLE is set."""
    # xDiT may be half imported by now, when it is what imports torch: its parts are watched as well as its top.
    if _undecided():
        sys.meta_path.insert(0, XDiTWatch())


def plug_in() -> None:
    """Install the plugin into the xDiT that is being imported, unless COCODIFF_DISABLE is set."""
    if _undecided():
        unwatch()
        _install()


def unwatch() -> None:
    """Remove the finder and close the entry points, as whoever installs or uninstalls the plugin explicitly must:
    looking for xDiT would trigger them."""
    global _decided
    _decided = True
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, XDiTWatch)]


def _undecided() -> bool:
    return not _decided and os.environ.get("COCODIFF_DISABLE", "").lower() in ("", "0", "false", "no", "off")


def _install() -> None:
    # Whatever is wrong with the plugin must not keep anybody from importing xDiT.
    try:
        from xfuser_cocodiff import install

        install()
    except Exception as error:
        print(
            f"cocodiff: the plugin is not installed, and xDiT runs unchanged: {type(error).__name__}: {error}",
            file=sys.stderr,
        )
