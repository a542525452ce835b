"""Traffic statistics, from given times and bytes, and ranges in profiler traces."""

import pytest
import torch

from xfuser_cocodiff.engine.comm.comm_stream import CommStream
from xfuser_cocodiff.engine.comm.traffic import Label, Traffic
from xfuser_cocodiff.engine.topology.devices import CPU


def test_bytes_are_those_for_other_ranks() -> None:
    traffic = Traffic()
    traffic.count_bytes("node", 3, 10)
    traffic.count_bytes("node", 2, 5)
    assert (traffic.sent_bytes, traffic.calls) == ({"node": 20 + 5}, {"node": 2})


class Event:
    """torch.Event of a device on which a quarter of a second passes between two events."""

    made = 0

    def __init__(self, device_type: str, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1
        self.milliseconds, self.is_reached = 250.0 * Event.made, False

    def record(self) -> None:
        """Ignore the stream."""

    def synchronize(self) -> None:
        self.is_reached = True

    def elapsed_time(self, end: "Event") -> float:
        assert end.is_reached
        return end.milliseconds - self.milliseconds


def test_seconds_of_an_accelerator_are_those_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", Event)
    traffic = Traffic(timed=True)
    for _ in range(2):
        with traffic.time_stage("gpu", torch.device("xpu")):
            pass
    for _ in range(2):  # reading them does not change them
        assert traffic.seconds == pytest.approx({"gpu": 0.5})
    traffic.reset()
    assert traffic.seconds == {} and traffic.timed


def test_untimed_collectives_record_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not in the capture of a graph, where an event has no time, and CUDA raises if it is read."""
    monkeypatch.setattr(torch, "Event", None)
    for traffic, is_captured in ((Traffic(timed=True), True), (Traffic(), False)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda is_captured=is_captured: is_captured)
        with traffic.time_stage("gpu", torch.device("cuda")):
            pass
        assert traffic.seconds == {}


def test_communication_has_ranges_in_profiler_traces() -> None:
    """Whether it runs in the thread of the comm stream or in the caller's, and whether it is timed."""
    comm_stream = CommStream.on(CPU)
    with torch.profiler.profile() as profiler:
        comm_stream.start(Label("v"), lambda: None, is_blocking=True).wait()
        comm_stream.start_collective(Label("o"), lambda: lambda: None).wait()
        for traffic in (Traffic(), Traffic(timed=True)):
            with traffic.time_stage("node", CPU):
                pass
    names = [one.name for one in profiler.events()]
    ranges = [f"cocodiff.{tensors}.{part}" for tensors in "vo" for part in ("exchange", "wait")]
    assert {name: names.count(name) for name in ranges} == dict.fromkeys(ranges, 1)
    assert names.count("cocodiff.node") == 2
