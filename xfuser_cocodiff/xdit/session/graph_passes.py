"""Passes of Inductor by which traced all-to-alls start as early and are waited for as late as possible."""

PASSES = ["raise_comms", "sink_waits"]
"""Those that depend on the graph only: estimated times may differ between ranks."""
_before: list | None = None
"""Inductor's passes before :func:`overlap_collectives` changed them, which were off."""


def overlap_collectives() -> bool:
    """Have Inductor overlap traced collectives with computation, unless the user or xDiT does.

    Returns:
        True, since Dynamo needs a constant.
    """
    global _before
    from torch._inductor import config

    if not config.reorder_for_compute_comm_overlap:
        _before = config.reorder_for_compute_comm_overlap_passes
        config.reorder_for_compute_comm_overlap_passes, config.reorder_for_compute_comm_overlap = PASSES, True
    return True


# Dynamo calls it while tracing, and leaves it out of the graph. torch.compiler.assume_constant_result sets the same
# attribute, but imports Dynamo, which takes a second.
overlap_collectives._dynamo_marked_constant = True  # type: ignore[attr-defined]


def restore() -> None:
    """Restore Inductor's settings, unless they have been changed since."""
    global _before
    if _before is not None:
        from torch._inductor import config

        if config.reorder_for_compute_comm_overlap_passes is PASSES:
            config.reorder_for_compute_comm_overlap_passes, config.reorder_for_compute_comm_overlap = _before, False
        _before = None
