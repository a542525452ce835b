"""What xDiT's pipeline asks for under this name."""


def compute_refiner_sigmas(*, t_thresh: float | None, **_: float) -> None:
    """None, as for whatever is not refined."""
    assert t_thresh is None
