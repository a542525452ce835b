"""Times of calls on a device that is simulated by two clocks: the host's, and that of the device's stream."""

import pytest
import torch

from benchmarks import device_timer
from benchmarks.device_timer import DeviceTimer

LAUNCH = 1e-5


class Clocks:
    """Host and device: a kernel starts once it is launched and those before it have ended."""

    def __init__(self) -> None:
        self.host = self.device = 0.0

    def launch(self, seconds: float) -> None:
        self.host += LAUNCH
        self.device = max(self.device, self.host) + seconds

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()

    class Event:
        def __init__(self, device_type: str, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = max(clocks.device, clocks.host)

        def elapsed_time(self, later: "Event") -> float:
            return 1e3 * (later.time - self.time)

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "synchronize", clocks.synchronize)
    monkeypatch.setattr(device_timer.time, "perf_counter", lambda: clocks.host)
    monkeypatch.setattr(device_timer, "_FLUSHED_BYTES", 16)
    monkeypatch.setattr(DeviceTimer, "_flush", lambda self: clocks.launch(1e-4))
    return clocks


@pytest.mark.parametrize(("kernels", "seconds"), [(1, 3e-3), (40, 2e-6), (200, 1e-6)])
def test_host_and_device_are_timed_apart(clocks: Clocks, kernels: int, seconds: float) -> None:
    """Short kernels take the host longer than the device; a timer that synchronizes would see the host only."""

    def call() -> None:
        for _ in range(kernels):
            clocks.launch(seconds)

    timer = DeviceTimer(torch.device("cpu"))
    assert timer.host_seconds(call) == pytest.approx(kernels * LAUNCH)
    assert timer.device_seconds(call) == pytest.approx(kernels * seconds)


def test_caches_are_flushed_before_each_call(clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(DeviceTimer, "_flush", lambda self: done.append("flush") or clocks.launch(1e-4))
    DeviceTimer(torch.device("cpu"))._seconds(lambda: done.append("call"), flushes=2)
    assert done == ["flush", "flush", "call"] * device_timer._CALLS
