"""How slow emulated links must be for stock's steps to be spent on them."""

from xfuser_cocodiff.comparison.overview import NODE, Setting, between_nodes
from xfuser_cocodiff.emulation.links import Cluster
from xfuser_cocodiff.machine.topology import FLAT

BYTES_PER_SECOND = 1e6 / 8
"""Of one Mbit/s."""
OVER_BOUND = 1.6
"""What stock's all-to-all takes, over what its bytes take: gloo posts sends first, and the two directions of a slow
link partly take turns. Measured at 18 and 55 KB of 2 x 2 ranks (1.63 and 1.66 with `cocodiff bench a2a`)."""


def scale_for(share: float, cluster: Cluster, unslowed: Setting) -> float:
    """The scale at which a cluster's links between nodes take a share of stock's step.

    Reckoned from the bytes of stock's all-to-alls, each rank of which sends alike to every other, and from how long its
    step takes where links cost next to nothing.

    Args:
        share: of the step.
        cluster: of one Ulysses group, at any scale.
        unslowed: a comparison of the same command, on links that are not slow.

    Raises:
        ValueError: that cannot be; says why.
    """
    stock = unslowed.stock
    if not 0 < share < 1:
        raise ValueError(f"--share {share:g} is not valid; valid are numbers between 0 and 1")
    if stock["degree"] != cluster.size:
        raise ValueError(
            f"--share goes by {unslowed.folder}, which ran --ulysses_degree {stock['degree']}; the cluster has "
            f"{cluster.size} ranks"
        )
    crossing = sum((stock["bytes"] or {}).values()) * between_nodes(FLAT, cluster.topology)
    if not crossing or NODE not in cluster.rates:
        raise ValueError("--share is of links between nodes, over which nothing is seen to travel here; give --scale")
    seconds = stock["step_seconds_spread"]["median"] * share / (1 - share)
    return OVER_BOUND * crossing / (seconds * cluster.rates[NODE] * BYTES_PER_SECOND)
