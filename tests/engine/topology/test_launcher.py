"""Topologies detected from the environment variables of launchers."""

import pytest

from xfuser_cocodiff.engine.topology.launcher import (
    detect,
    ranks_per_node,
    tiles_per_gpu,
)

PVC = "Intel(R) Data Center GPU Max 1550"


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"SLURM_TASKS_PER_NODE": "4(x2)"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "6", "SLURM_TASKS_PER_NODE": "8"}, 6),
        ({"SLURM_TASKS_PER_NODE": "4(x2),3"}, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({}, None),
    ],
)
def test_ranks_per_node(environment: dict[str, str], count: int | None) -> None:
    assert ranks_per_node(environment) == count


@pytest.mark.parametrize(
    ("hierarchy", "device", "tiles"),
    [
        (None, PVC, 2),
        ("COMPOSITE", PVC, 1),
        (None, "", 1),
        ("FLAT", "Intel(R) Data Center GPU Max 1100", 1),
    ],
)
def test_tiles(hierarchy: str | None, device: str, tiles: int) -> None:
    environment = {"ZE_FLAT_DEVICE_HIERARCHY": hierarchy} if hierarchy else {}
    assert tiles_per_gpu(environment, device) == tiles


@pytest.mark.parametrize(
    ("degree", "local", "device", "expected"),
    [
        (12, 12, PVC, "gpu=6,tile=2"),
        (24, 12, PVC, "node=2,gpu=6,tile=2"),
        (16, 8, "", "node=2,gpu=8"),
        (4, 1, "", "node=4"),
        (8, 6, "", "flat"),  # nodes would divide groups unevenly
        (4, 6, "", "flat"),  # the second group would span two nodes, the first one
        (3, 12, PVC, "flat"),  # three ranks are not divisible into tile pairs
    ],
)
def test_detect(degree: int, local: int, device: str, expected: str) -> None:
    topology = detect(degree, {"LOCAL_WORLD_SIZE": str(local)}, device)
    assert str(topology) == expected
    assert topology.size == degree


@pytest.mark.parametrize(("nodes", "expected"), [("1", "flat"), ("2", "flat"), ("4", "node=4"), ("5", "node=4")])
def test_slurm_job_limits_the_number_of_nodes(nodes: str, expected: str) -> None:
    assert str(detect(4, {"SLURM_TASKS_PER_NODE": f"1(x{nodes})", "SLURM_NNODES": nodes})) == expected
