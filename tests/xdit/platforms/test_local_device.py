"""Local ranks and shared devices, from variables of launchers and masks of devices."""

import pytest

from xfuser_cocodiff.xdit.platforms.local_device import device_index, local_rank, shares_device


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({"LOCAL_RANK": "3", "PALS_LOCAL_RANKID": "5"}, 3),
        ({"SLURM_LOCALID": "2"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 1),
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


@pytest.mark.parametrize(
    ("environment", "arguments", "devices", "shared"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, [], 1, True),
        ({"LOCAL_WORLD_SIZE": "2"}, [], 2, False),
        ({"LOCAL_WORLD_SIZE": "2"}, [], 0, False),  # no accelerator
        ({"LOCAL_WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": "3"}, [], 1, False),  # each rank may see another device
        ({"LOCAL_WORLD_SIZE": "8", "HIP_VISIBLE_DEVICES": "3"}, [], 1, False),
        ({"LOCAL_WORLD_SIZE": "8", "HIP_VISIBLE_DEVICES": "0,1"}, [], 2, True),
        ({"LOCAL_WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": "3"}, ["--cocodiff_share_device"], 1, True),
        ({"LOCAL_WORLD_SIZE": "2", "COCODIFF_SHARE_DEVICE": "0"}, [], 2, False),
    ],
)
def test_shares_device(environment: dict, arguments: list[str], devices: int, shared: bool) -> None:
    assert shares_device(environment, arguments, devices) is shared
