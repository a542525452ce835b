"""Axes of figures that several commands draw."""

from typing import Any


def fidelity_by_bytes(axes: Any, to: str) -> None:
    """Bytes to the right, as shares on a scale of ratios, and fidelity up.

    Args:
        axes: matplotlib's.
        to: what pictures are compared with.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set(xscale="log", xlabel="share of exact bytes on slow links", ylabel=f"PSNR to {to}, dB")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
