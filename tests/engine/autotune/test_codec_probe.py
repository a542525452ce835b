"""The codec probe: what it times."""

from collections.abc import Callable

import pytest
import torch

from xfuser_cocodiff.engine.autotune import codec_probe
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.codec.rows import MessagePart
from xfuser_cocodiff.engine.topology import devices

CPU = torch.device("cpu")


def test_figures_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The throughput is not dominated by launches, else fast axes would be slow. The host time is that of later steps,
    whose tensors have references, per tensor."""
    monkeypatch.setattr(devices, "capabilities", lambda device_type: devices.Capabilities())
    parts: list[list[MessagePart]] = []
    timed_calls: list[int] = []
    encode = kernels.encode
    monkeypatch.setattr(kernels, "encode", lambda given, energies: parts.append(given) or encode(given, energies))

    def seconds(work: Callable[[], object], calls: int) -> float:
        parts.clear()
        work()
        timed_calls.append(calls)
        encoded = [part for each in parts for part in each]
        if len(encoded) == 1:
            return 1.0
        assert [part.bits for part in encoded] == [2, 2, 2, 2]
        return 8.0

    throughput, host_seconds = codec_probe.measure(CPU, seconds)
    assert throughput >= 2**26 and host_seconds == 2.0
    assert min(timed_calls) > 1
