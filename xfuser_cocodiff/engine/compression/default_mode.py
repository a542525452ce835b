"""Names of the modes, and which of them is the default; :mod:`modes` has the schedules of the lossy ones."""

EXACT, PAPER = "exact", "paper"
MODES = (EXACT, PAPER, "balanced", "fast")
MULTI_NODE_MODE = "balanced"
"""Default mode of ranks on several nodes; within a node it is exact."""


def default_mode(spans_nodes: bool) -> str:
    """Return the mode of a run without --cocodiff_mode, by whether the ranks that share a sequence span nodes."""
    return MULTI_NODE_MODE if spans_nodes else EXACT
