"""Inference of a topology from pairwise latency and bandwidth. Arithmetic only; nothing communicates."""

import math
from collections.abc import Iterator

import numpy as np

from xfuser_cocodiff.engine.topology.topology import AXIS_NAMES, NESTING, Topology
from xfuser_cocodiff.tools.probing.pairwise_links import Pairs

BANDWIDTH_RATIO = 1.4
"""Minimum ratio of the bandwidths of neighboring axes. Each axis adds a collective, which pays off only between links
of clearly different bandwidth."""
LATENCY_RATIO = 3.0
"""Minimum ratio of the latencies of neighboring axes, which vary more from pair to pair and matter less."""
FLOOR = 0.02
"""Deviation (natural logarithm) that counts as measurement noise."""


def infer_topology(pairs: Pairs, ranks_per_node: int | None = None, tiles_per_gpu: int = 1) -> Topology:
    """Return the topology whose axes explain the measurements best.

    A topology of up to three axes predicts which pairs have equal links: those whose ranks differ on the same outermost
    axis. Of the topologies whose neighboring axes differ enough, the one with the smallest mean absolute deviation from
    the median of each axis wins; absolute deviations, because a few pairs may have been disturbed.

    Args:
        pairs: measurements of ranks that are numbered along the innermost axis first.
        ranks_per_node: makes nodes the outermost axis, even if their links measure like others: a pair has the network
            cards of its node to itself, an all-to-all does not. None if unknown: no axis is named a node then, because
            the default mode is lossy between nodes.
        tiles_per_gpu: size of an innermost axis that is named `tile`, if larger than 1.

    Returns:
        The topology; flat if one axis explains the measurements as well.
    """
    if pairs.size == 1:
        return Topology.flat(1)
    nodes, shapes = 1, _shapes(pairs.size, len(AXIS_NAMES))
    if ranks_per_node and pairs.size % ranks_per_node == 0:
        nodes = pairs.size // ranks_per_node
        inside = _shapes(ranks_per_node, len(AXIS_NAMES) - 1) if ranks_per_node > 1 else [()]
        shapes = ((nodes, *inner) if nodes > 1 else inner for inner in inside)
    best = min(shapes, key=lambda shape: _deviation(pairs, shape, nodes > 1))
    return _named(best, tiles_per_gpu, nodes > 1) if len(best) > 1 or nodes > 1 else Topology.flat(pairs.size)


def _named(shape: tuple[int, ...], tiles_per_gpu: int, has_nodes: bool) -> Topology:
    """Return the topology of a shape, whose axes within a node are named from the innermost."""
    likely = ("tile", "gpu", "socket") if shape[-1] == tiles_per_gpu else ("gpu", "socket", "switch")
    inside = sorted(likely[: len(shape) - has_nodes], key=NESTING.index)
    return Topology.named(**dict(zip(["node"] * has_nodes + inside, shape, strict=True)))


def _shapes(size: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yield all shapes of `size` ranks with at most `axes` axes, each larger than 1; the flat one first."""
    yield (size,)
    for outer in range(2, size // 2 + 1):
        if axes > 1 and size % outer == 0:
            yield from ((outer, *inner) for inner in _shapes(size // outer, axes - 1))


def _deviation(pairs: Pairs, shape: tuple[int, ...], has_nodes: bool) -> float:
    """Return the deviation from the medians of a shape's axes, on a logarithmic scale.

    Infinity if neighboring axes do not differ, except for an outer axis that is known to be nodes.
    """
    upper = np.triu_indices(pairs.size, 1)
    coordinates = np.indices(shape).reshape(len(shape), -1)  # by axis and rank
    differ = coordinates[:, :, None] != coordinates[:, None, :]
    levels = differ.argmax(0)[upper]  # of each pair, the outermost axis on which it differs
    deviation, differs = 0.0, np.zeros(len(shape) - 1, dtype=bool)
    for matrix, ratio in ((pairs.latency_seconds, LATENCY_RATIO), (pairs.bytes_per_second, BANDWIDTH_RATIO)):
        values = np.log(np.sqrt(matrix * matrix.T))[upper]
        medians = np.array([np.median(values[levels == level]) for level in range(len(shape))])
        deviation += math.log(np.abs(values - medians[levels]).mean() + FLOOR)
        differs |= np.abs(np.diff(medians)) >= math.log(ratio)
    return deviation if differs[has_nodes:].all() else math.inf
