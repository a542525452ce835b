"""The entry point that PyTorch calls at the end of ``import torch`` (group ``torch.backends``).

It must cost next to nothing and never raise, so it only leaves a standard-library finder behind; the plugin itself is
loaded when somebody imports xDiT.
"""

import os
import sys
from importlib.machinery import ModuleSpec


class XDiTWatch:
    """Sits first in sys.meta_path until xDiT is looked for, installs the plugin, and leaves."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
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
    if os.environ.get("COCODIFF_DISABLE", "").lower() in ("", "0", "false", "no", "off"):
        sys.meta_path.insert(0, XDiTWatch())


def unwatch() -> None:
    """Remove the finder, as whoever installs the plugin explicitly must: looking for xDiT would trigger it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, XDiTWatch)]


def _install() -> None:
    # Whatever is wrong with the plugin must not keep anybody from importing xDiT.
    try:
        from xfuser_cocodiff import install

        install()
    except Exception as error:
        print(f"cocodiff: not installed, xDiT stays as it is: {type(error).__name__}: {error}", file=sys.stderr)
