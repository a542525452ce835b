"""Pairwise measurements and topology inference: arithmetic, then real ranks, then the emulated cluster."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import ranks
from tests.emulation.test_cluster import LAUNCHER, needs_namespaces
from tests.quick import slow
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.probing import link_survey, pairwise_links
from xfuser_cocodiff.tools.probing.pairwise_links import Pairs
from xfuser_cocodiff.tools.probing.topology_inference import infer_topology

seeds = st.integers(0, 2**32 - 1)


def level(topology: Topology, one: int, other: int) -> int:
    """Return the index of the outermost axis on which two ranks differ."""
    coordinates = zip(topology.coordinates(one), topology.coordinates(other), strict=True)
    return next(dim for dim, (a, b) in enumerate(coordinates) if a != b)


def noisy(topology: Topology, values: list[float], noise: float, seed: int) -> np.ndarray:
    """Return a matrix of one value per axis, each multiplied or divided by up to 1 + `noise`."""
    size, random = topology.size, np.random.default_rng(seed)
    matrix = np.full((size, size), math.nan)
    for one in range(size):
        for other in set(range(size)) - {one}:
            matrix[one, other] = values[level(topology, one, other)] * (1 + noise) ** random.uniform(-1, 1)
    return matrix


def synthetic(shape: str, speeds: list[float], seed: int, size: int) -> Pairs:
    topology = Topology.parse(shape, size)
    return Pairs(noisy(topology, [1e-4] * len(speeds), 1.0, seed), noisy(topology, speeds, 0.1, seed + 1))


@given(st.integers(1, 25))
def test_round_robin_pairs_all_ranks_exactly_once(size: int) -> None:
    pairs = []
    for peers in pairwise_links.rounds(size):
        assert all(peers[peer] == rank for rank, peer in enumerate(peers))
        pairs += [(rank, peer) for rank, peer in enumerate(peers) if rank < peer]
    assert sorted(pairs) == [(one, other) for one in range(size) for other in range(one + 1, size)]
    assert len(list(pairwise_links.rounds(size))) <= size


@settings(max_examples=15)
@given(seeds)
@pytest.mark.parametrize(
    ("shape", "speeds", "ranks_per_node", "tiles", "found"),
    [
        # A pair on two nodes of Aurora is as fast as one on two GPUs.
        ("2x2x2", [13.3, 12, 148], 4, 2, "node=2,gpu=2,tile=2"),
        ("2x6x2", [13.3, 12, 148], 12, 2, "node=2,gpu=6,tile=2"),
        ("2x6x2", [13.3, 12, 148], None, 2, "gpu=12,tile=2"),
        ("2x4", [1, 1], 4, 1, "node=2,gpu=4"),
        ("2x4", [1, 1], 4, 2, "node=2,gpu=4"),
        ("flat", [1], 8, 1, "flat"),
        ("6x2", [1, 5], 12, 2, "gpu=6,tile=2"),
        ("6x2", [1, 5], 2, 2, "node=6,tile=2"),
        ("6x2", [1, 5], 1, 1, "node=12"),
        # A node axis would make the default mode lossy within a node.
        ("2x4", [1, 5], 8, 1, "socket=2,gpu=4"),
        ("2x4", [1, 5], None, 1, "socket=2,gpu=4"),
        ("2x2x4", [1, 5, 25], 8, 1, "node=2,socket=2,gpu=4"),
        ("2x2x2", [1, 5, 25], None, 1, "socket=2,switch=2,gpu=2"),
    ],
)
def test_axes_are_named_by_launcher_and_device(
    shape: str, speeds: list[float], ranks_per_node: int | None, tiles: int, found: str, seed: int
) -> None:
    size = math.prod(map(int, shape.split("x"))) if shape != "flat" else 8
    assert str(infer_topology(synthetic(shape, speeds, seed, size), ranks_per_node, tiles)) == found


def test_axes_are_inferred_from_latency_alone() -> None:
    topology = Topology.parse("2x4", 8)
    bandwidths = noisy(topology, [1, 1], 0.1, 0)
    assert infer_topology(Pairs(noisy(topology, [5, 1], 0.5, 1), bandwidths)).shape == topology.shape


def test_inference_is_robust_to_a_few_disturbed_pairs() -> None:
    found = synthetic("2x2x2", [1, 3, 9], 0, 8)
    matrix = found.bytes_per_second
    matrix[0, 1], matrix[2, 6], matrix[5, 1] = 0.1, 20, 0.3
    assert infer_topology(found).shape == (2, 2, 2)


# Real gloo ranks, on the loopback interface.


def measured(rank: int, members: list[int] | None) -> tuple[np.ndarray, ...] | None:
    group = dist.new_group(members) if members else None
    if members and rank not in members:
        return None
    return tuple(vars(pairwise_links.measure_pairs(group)).values())


@pytest.mark.parametrize(("size", "members"), [slow(3, None), (4, [1, 3])])
def test_all_ranks_return_the_same_measurements(size: int, members: list[int] | None) -> None:
    found = [matrices for matrices in ranks.run(measured, size, members) if matrices is not None]
    assert len(found) == len(members or range(size))
    for matrices in found:
        for matrix, first in zip(matrices, found[0], strict=True):
            assert np.array_equal(matrix, first, equal_nan=True)
            assert matrix.shape == (len(found), len(found))
            assert np.isnan(matrix.diagonal()).all()
            assert (matrix[~np.eye(len(found), dtype=bool)] > 0).all()


def ranks_per_node(rank: int, local: list[str], nodes: str) -> int | None:
    os.environ.update(LOCAL_WORLD_SIZE=local[rank], SLURM_NNODES=nodes)
    return link_survey._ranks_per_node(4, torch.device("cpu"))


@pytest.mark.parametrize(
    ("local", "nodes", "expected"), [(["2", "2"], "", 2), (["2", "4"], "", None), (["1", "1"], "2", None)]
)
def test_ranks_per_node_needs_agreeing_launchers(local: list[str], nodes: str, expected: int | None) -> None:
    """And at most as many nodes as the job has."""
    assert ranks.run(ranks_per_node, 2, local, nodes) == [expected] * 2


# The emulated cluster.


@pytest.mark.slow  # quicker: inference from synthetic measurements above, and the link rates of test_cluster
@pytest.mark.alone
@needs_namespaces
def test_the_emulated_topology_is_inferred() -> None:
    program = """
import os, numpy, torch, torch.distributed as dist
torch.set_num_threads(1)
from xfuser_cocodiff.tools.probing import pairwise_links, topology_inference
from emulation import links
dist.init_process_group("gloo")
built, measured = links.from_environment(), pairwise_links.measure_pairs()
found = topology_inference.infer_topology(measured, int(os.environ["LOCAL_WORLD_SIZE"]), tiles_per_gpu=2)
assert found == built.topology, found
# Other load on the machine slows the fast links.
for link in built.links(0):
    rate = 8e-6 * numpy.median(measured.bytes_per_second[0, list(link.ranks)])
    assert 0.6 < rate / built.rates[link.axis] < 1.2, (link, rate)
dist.barrier()
dist.destroy_process_group()
"""
    line = [*LAUNCHER, "--preset", "aurora", "--scale", "0.5", "--", sys.executable, "-c", program]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
