"""Reads a machine's topology off the measured speed of its pairs of ranks. Arithmetic only; nothing communicates."""

import math
from collections.abc import Iterator

import numpy as np

from xfuser_cocodiff.engine.topology.topology import AXIS_NAMES, Topology
from xfuser_cocodiff.lab.probing.pairwise_links import Pairs

BANDWIDTH_RATIO = 1.4
"""By how much bandwidths of neighbouring axes differ at least. An axis more is a collective more, which does not pay
for links that are nearly alike."""
LATENCY_RATIO = 3.0
"""The same for latencies, which vary more from pair to pair, and matter less."""
FLOOR = 0.02
"""Deviation (natural logarithm) below which nothing is left to explain: no measurement is that good."""


def infer_topology(pairs: Pairs, ranks_per_node: int | None = None) -> Topology:
    """The simplest nesting that explains the measurements.

    Every nesting of up to three axes says which pairs should be alike: those whose ranks differ on the same outermost
    axis. Of the nestings whose neighbouring axes do differ, that one is taken which leaves the smallest deviations from
    the median of each axis; absolute ones, since a few pairs may have been disturbed.

    Args:
        pairs: of ranks that count the innermost axis fastest.
        ranks_per_node: where that is known, nodes are the outermost axis, even if their links look like others: the
            pairs of a measurement do not share network cards as an all-to-all does.

    Returns:
        Axes as a topology's notation names them, or the flat topology where one axis explains as much.
    """
    if pairs.size == 1:
        return Topology.flat(1)
    nodes, shapes = 1, _shapes(pairs.size, len(AXIS_NAMES))
    if ranks_per_node and pairs.size % ranks_per_node == 0:
        nodes = pairs.size // ranks_per_node
        shapes = ((nodes, *inner) for inner in _shapes(ranks_per_node, len(AXIS_NAMES) - 1))
    nestings = [{name: size for name, size in zip(AXIS_NAMES, shape, strict=False) if size > 1} for shape in shapes]
    best = min(nestings, key=lambda axes: _unexplained(pairs, tuple(axes.values()), nodes > 1))
    return Topology.named(**best) if len(best) > 1 or nodes > 1 else Topology.flat(pairs.size)


def _shapes(size: int, axes: int) -> Iterator[tuple[int, ...]]:
    """All ways to nest `size` ranks in up to so many axes of more than one, the flat one first."""
    yield (size,)
    for outer in range(2, size // 2 + 1):
        if axes > 1 and size % outer == 0:
            yield from ((outer, *inner) for inner in _shapes(size // outer, axes - 1))


def _unexplained(pairs: Pairs, shape: tuple[int, ...], has_nodes: bool) -> float:
    """What a nesting leaves unexplained, on a logarithmic scale; infinity where neighbouring axes do not differ, unless
    the outer one is known to be nodes."""
    upper = np.triu_indices(pairs.size, 1)
    levels = _levels(shape)[upper]
    unexplained, differs = 0.0, np.zeros(len(shape) - 1, dtype=bool)
    for matrix, ratio in ((pairs.latency_seconds, LATENCY_RATIO), (pairs.bytes_per_second, BANDWIDTH_RATIO)):
        values = np.log(np.sqrt(matrix * matrix.T))[upper]
        medians = np.array([np.median(values[levels == level]) for level in range(len(shape))])
        unexplained += math.log(np.abs(values - medians[levels]).mean() + FLOOR)
        differs |= np.abs(np.diff(medians)) >= math.log(ratio)
    return unexplained if differs[has_nodes:].all() else math.inf


def _levels(shape: tuple[int, ...]) -> np.ndarray:
    """For every two ranks the number of the outermost axis on which they differ; for a rank itself that of axes."""
    size = math.prod(shape)
    ranks, levels = np.arange(size), np.full((size, size), len(shape))
    for dim in reversed(range(len(shape))):
        place = ranks // math.prod(shape[dim + 1 :])
        levels[place[:, None] != place[None, :]] = dim
    return levels
