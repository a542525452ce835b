"""Errors of a step: their values on the host, and on a mock device that the host waits only when it reads them."""

import pytest
import torch

from tests import ranks
from tests.mock_device import HAS_BACKENDS, DisorderError, MockDevice, register_mock_device
from xfuser_cocodiff.engine.compression.step_errors import StepErrors, TensorError
from xfuser_cocodiff.engine.topology.devices import CPU


def read(errors: StepErrors) -> list[tuple[float, float]]:
    """Return the energies of the step."""
    return [(each.error_energy, each.value_energy) for each in errors.start_readout().read()]


def test_errors_are_read_in_order() -> None:
    errors = StepErrors()
    for energy in (1.0, torch.inf, 0.0):
        errors.add([TensorError("v")], CPU).copy_(torch.tensor([[energy, 4.0]]))
        errors.add([], CPU)  # a lossless message
    assert read(errors) == [(1, 4), (torch.inf, 4), (0, 4)]
    assert read(errors) == []


def test_errors_of_more_tensors_than_a_chunk_has() -> None:
    """Messages are never split between chunks, begin at 16 bytes, and use the same memory in the next step."""
    errors, places = StepErrors(), []
    for step in range(3):
        expected: list[tuple[float, float]] = []
        places.append([])
        while len(expected) < 700:
            count = (3, 1, 2)[len(expected) % 3]
            added = [TensorError("v") for _ in range(count)]
            energies = errors.add(added, CPU)
            wanted = [(float(1000 * step + len(expected) + row), float(row)) for row in range(count)]
            assert energies.shape == (count, 2) and energies.is_contiguous() and energies.data_ptr() % 16 == 0
            energies.copy_(torch.tensor(wanted))
            places[-1].append(energies.data_ptr())
            expected += wanted
        assert read(errors) == expected
    assert places[0] == places[1] == places[2] and len(set(places[0])) == len(places[0])


def test_a_following_branch_has_the_error_of_its_leader_too() -> None:
    errors, leader = StepErrors(), TensorError("v")
    for error, energy in (
        (leader, 1.0),
        (TensorError("v", leader=leader), 2.0),
        (TensorError("v", leader=leader), 4.0),
    ):
        errors.add([error], CPU).copy_(torch.tensor([[energy, 8.0]]))
    assert read(errors) == [(1, 8), (3, 8), (5, 8)]


def read_on_mock_device(rank: int) -> None:
    device = register_mock_device()
    with MockDevice() as mock_device:
        errors = StepErrors()
        errors.add([TensorError("v") for _ in range(3)], device).fill_(1.0)
        readout = errors.start_readout()  # raises if the host waits
        with pytest.raises(DisorderError, match="may not have finished"):
            mock_device.read_on_host(readout._chunks[0])
        readout._copied.synchronize()
        mock_device.read_on_host(readout._chunks[0])


@pytest.mark.skipif(not HAS_BACKENDS, reason="needs a PyTorch that supports devices written in Python")
def test_the_host_waits_for_errors_only_when_it_reads_them() -> None:
    ranks.run(read_on_mock_device, 1)
