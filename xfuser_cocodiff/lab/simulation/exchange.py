"""Names how attention crosses the axes of a Ulysses group, and why, in words."""

from collections.abc import Sequence

from xfuser_cocodiff.engine.compression.mode_names import EXACT, PAPER
from xfuser_cocodiff.engine.topology import planner
from xfuser_cocodiff.engine.topology.planner import SentSizes
from xfuser_cocodiff.engine.topology.plans import HEADS, KV
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.simulation.collectives import num_ranks_along

UNCODED_REASON = (
    "heads: coding would add more host time than it saves link time, so layers are lossless; --cocodiff_slow_axes "
    "names axes to compress all the same"
)
"""Reason of a lossy mode where :class:`CodingCost` leaves layers lossless."""


def by_axis(group: Topology, gathered_axes: Sequence[str]) -> dict[str, str]:
    """Return how attention crosses each axis with several ranks.

    Args:
        group: topology of the Ulysses group.
        gathered_axes: names of the axes along which K and V are gathered.
    """
    return {axis.name: KV if axis.name in gathered_axes else HEADS for axis in group.axes if axis.size > 1}


def describe(exchange: dict[str, str]) -> str:
    """Return the exchange of each axis in one short cell, such as 'node kv, gpu heads'."""
    return ", ".join(f"{axis} {how}" for axis, how in exchange.items())


def gathered(exchange: dict[str, str]) -> list[str]:
    """Return the names of the axes along which K and V are gathered."""
    return [axis for axis, how in exchange.items() if how == KV]


def lossy_reason(group: Topology, slow_axes: Sequence[str], sizes: SentSizes, mode: str, has_ring: bool) -> str:
    """Return why a lossy mode gathers K and V along the slow axes or does not; empty where none has several ranks.

    Args:
        group: topology of the Ulysses group.
        slow_axes: names of its slow axes.
        sizes: sizes of Q and K on a rank, in units of K without zero padding.
        mode: mode of the plugin.
        has_ring: whether there is a ring beside the group.
    """
    num_slow = num_ranks_along(group, slow_axes)
    if num_slow == 1:
        return ""
    along = f"along {' and '.join(slow_axes)}"
    if mode == PAPER:
        return f"heads {along}: mode {PAPER!r} does not gather K and V"
    if has_ring:
        return f"heads {along}: beside a ring, K and V are not gathered"
    ratios = byte_ratios(num_slow, sizes)
    if planner.gathers_kv(num_slow, sizes):
        return f"kv {along}, {num_slow} coordinates: {ratios}, and Q and O stay exact"
    return f"heads {along}, {num_slow} coordinates: {ratios}"


def lossless_reason(gathered_axes: Sequence[str]) -> str:
    """Return why a lossless mode gathers K and V; empty where it does not."""
    if not gathered_axes:
        return ""
    along = f"along {' and '.join(gathered_axes)}"
    return f"kv {along}: predicted to be faster in mode {EXACT!r}, which checks at the start that bits are the same"


def byte_ratios(num_slow: int, sizes: SentSizes) -> str:
    """Return the bytes of both exchanges in those of K on a rank; see :func:`planner.gathers_kv`."""
    gather = 2 * sizes.gathered_key * (num_slow - 1)
    all_to_alls = 2 * (sizes.query + sizes.key) * (num_slow - 1) / num_slow
    of_key = "times the bytes of a rank's K"
    return f"a gather sends {gather:.3g} {of_key}, all-to-alls of Q, K, V and O {all_to_alls:.3g} times"
