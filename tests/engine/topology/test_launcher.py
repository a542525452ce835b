"""Topologies detected from the environment variables of launchers."""

import pytest

from xfuser_cocodiff.engine.topology.launcher import (
    collectives_are_synchronous,
    detect,
    device_index,
    local_rank,
    ranks_per_node,
    shares_device,
    tiles_per_gpu,
)

PVC = "Intel(R) Data Center GPU Max 1550"


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"PALS_LOCAL_SIZE": "12"}, 12),
        ({"SLURM_TASKS_PER_NODE": "4(x2)"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "6", "SLURM_TASKS_PER_NODE": "8"}, 6),
        ({"SLURM_TASKS_PER_NODE": "4(x2),3"}, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "0"}, None),
    ],
)
def test_ranks_per_node(environment: dict[str, str], count: int | None) -> None:
    assert ranks_per_node(environment) == count


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({"LOCAL_RANK": "3", "PALS_LOCAL_RANKID": "5"}, 3),
        ({"PALS_LOCAL_RANKID": "11"}, 11),
        ({"SLURM_LOCALID": "2"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 1),
        ({"MPI_LOCALRANKID": "4"}, 4),
        ({}, 0),
    ],
)
def test_local_rank(environment: dict[str, str], rank: int) -> None:
    assert local_rank(environment) == rank


def test_invalid_local_rank() -> None:
    with pytest.raises(ValueError, match=r"PALS_LOCAL_RANKID='first' is not valid; valid are numbers from 0"):
        local_rank({"PALS_LOCAL_RANKID": "first"})


@pytest.mark.parametrize(("mask", "index"), [(None, 7), ("", 7), ("7", 0), ("3.1", 0), ("0,1,2,3,4,5,6,7", 7)])
def test_device_index(mask: str | None, index: int) -> None:
    assert device_index(7, {} if mask is None else {"ZE_AFFINITY_MASK": mask}) == index


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("0", False), ("1", True), ("true", True), ("", False)])
def test_synchronous_collectives(value: str | None, expected: bool) -> None:
    assert collectives_are_synchronous({} if value is None else {"CCL_OP_SYNC": value}) == expected


@pytest.mark.parametrize(
    ("hierarchy", "device", "tiles"),
    [
        (None, PVC, 2),
        ("FLAT", PVC, 2),
        ("COMBINED", PVC, 2),
        ("COMPOSITE", PVC, 1),
        ("FLAT", "", 2),
        (None, "", 1),
        ("FLAT", "Intel(R) Data Center GPU Max 1100", 1),
        (None, "Intel(R) Arc(TM) B580 Graphics", 1),
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
        (4, 12, PVC, "gpu=2,tile=2"),
        (2, 12, PVC, "flat"),
        (16, 8, "", "node=2,gpu=8"),
        (8, 8, "", "flat"),
        (4, 2, "", "node=2,gpu=2"),
        (4, 1, "", "node=4"),
        (8, 6, "", "flat"),  # nodes would divide groups unevenly
        (4, 6, "", "flat"),  # the second group would span two nodes, the first one
        (3, 12, PVC, "flat"),  # three ranks are not divisible into tile pairs
        (1, 8, PVC, "flat"),
    ],
)
def test_detect(degree: int, local: int, device: str, expected: str) -> None:
    topology = detect(degree, {"LOCAL_WORLD_SIZE": str(local)}, device)
    assert str(topology) == expected
    assert topology.size == degree


@pytest.mark.parametrize(("nodes", "expected"), [("1", "flat"), ("2", "flat"), ("4", "node=4"), ("5", "node=4")])
def test_slurm_job_limits_the_number_of_nodes(nodes: str, expected: str) -> None:
    assert str(detect(4, {"SLURM_TASKS_PER_NODE": f"1(x{nodes})", "SLURM_NNODES": nodes})) == expected


def test_numbers_of_nodes_that_are_not_numbers_are_ignored() -> None:
    """They are the launcher's, and stock xDiT does not read them."""
    assert str(detect(4, {"LOCAL_WORLD_SIZE": "1", "SLURM_NNODES": "1-4"})) == "node=4"


def test_detect_without_a_launcher_is_flat() -> None:
    assert str(detect(4, {})) == "flat"


@pytest.mark.parametrize(
    ("environment", "arguments", "devices", "shared"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, [], 1, True),
        ({"LOCAL_WORLD_SIZE": "2"}, [], 2, False),
        ({}, [], 1, False),
        ({"LOCAL_WORLD_SIZE": "2"}, [], 0, False),  # no accelerator
        ({"LOCAL_WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": "3"}, [], 1, False),  # each rank may see another device
        ({"LOCAL_WORLD_SIZE": "8", "ROCR_VISIBLE_DEVICES": "3"}, [], 1, False),
        ({"LOCAL_WORLD_SIZE": "8", "HIP_VISIBLE_DEVICES": "3"}, [], 1, False),
        ({"LOCAL_WORLD_SIZE": "8", "GPU_DEVICE_ORDINAL": "3"}, [], 1, False),
        ({"LOCAL_WORLD_SIZE": "8", "HIP_VISIBLE_DEVICES": "0,1"}, [], 2, True),
        ({"LOCAL_WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": "3"}, ["--cocodiff_share_device"], 1, True),
        ({"LOCAL_WORLD_SIZE": "2", "COCODIFF_SHARE_DEVICE": "1"}, [], 2, True),
        ({"LOCAL_WORLD_SIZE": "2", "COCODIFF_SHARE_DEVICE": "0"}, [], 2, False),
    ],
)
def test_shares_device(environment: dict, arguments: list[str], devices: int, shared: bool) -> None:
    assert shares_device(environment, arguments, devices) is shared
