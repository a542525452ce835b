"""xDiT's USP as `attention.usp` does it again. Another one runs as it is, over the plugin's exchanges."""

from xfuser_cocodiff.xdit.patching import source

MODULE = "xfuser.model_executor.layers.usp"
DIGESTS = {"0.7.0": "ec75322fd6991cd4"}
"""Of the functions that are done again, by version of xfuser."""


def digest() -> str:
    """Return the hash of the installed functions."""
    return source.digest(MODULE, ("USP", "ring_attn")) or "none"


def is_known() -> bool:
    """Whether the installed USP is one that is done again here. All ranks have the same one."""
    return digest() in DIGESTS.values()
