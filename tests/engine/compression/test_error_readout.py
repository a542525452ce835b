"""Errors on their way to the host: their values, and on a mock device that the host waits only when it reads them."""

import pytest
import torch

from tests import ranks
from tests.lab.accelerator.emulated import accelerator
from tests.mock_device import HAS_BACKENDS, DisorderError, MockDevice, register_mock_device
from xfuser_cocodiff.engine.codec.coded_tensor import QuantError
from xfuser_cocodiff.engine.compression.error_readout import ErrorReadout


def test_errors_are_read_in_order() -> None:
    errors = [QuantError(torch.tensor(energy), torch.tensor(4.0)) for energy in (1.0, torch.inf, 0.0)]
    assert ErrorReadout(errors).read() == [(1, 4), (torch.inf, 4), (0, 4)]
    assert ErrorReadout([]).read() == []


def read_on_mock_device(rank: int) -> None:
    device = register_mock_device()
    with MockDevice() as mock_device:
        errors = [QuantError(torch.ones((), device=device), torch.ones((), device=device)) for _ in range(3)]
        readout = ErrorReadout(errors)  # raises if the host waits
        with pytest.raises(DisorderError, match="may not have finished"):
            mock_device.read_on_host(readout._host)
        readout._copied.synchronize()
        mock_device.read_on_host(readout._host)


def waits_on_emulated_device(rank: int) -> tuple[list[tuple[float, float]], list[bool]]:
    """Return the errors, and whether the host had waited for the device: once they were queued, and after reading."""
    with accelerator(1) as emulator:
        errors = [QuantError(*torch.zeros(2, device=emulator.device))]
        emulator.launch(1000.0)
        readout, host_times = ErrorReadout(errors), [emulator.host_time]
        found = readout.read()
        host_times.append(emulator.host_time)
        return found, [time.resolve({}) > 1000 for time in host_times]


@pytest.mark.skipif(not HAS_BACKENDS, reason="needs a PyTorch that supports devices written in Python")
def test_emulated_devices_read_zeros() -> None:
    assert ranks.run(waits_on_emulated_device, 1) == [([(0.0, 0.0)], [False, True])]


@pytest.mark.skipif(not HAS_BACKENDS, reason="needs a PyTorch that supports devices written in Python")
def test_the_host_waits_for_errors_only_when_it_reads_them() -> None:
    ranks.run(read_on_mock_device, 1)
