"""Times of collectives, from given times of events."""

import pytest
import torch

from xfuser_cocodiff.tools.comparison.stage_timer import StageTimer


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
    timer = StageTimer()
    for _ in range(2):
        with timer("gpu", torch.device("xpu")):
            pass
    for _ in range(2):  # reading them does not change them
        assert timer.seconds() == pytest.approx({"gpu": 0.5})


def test_collectives_of_a_captured_graph_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event has no time there, and CUDA raises if it is read."""
    monkeypatch.setattr(torch, "Event", None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    timer = StageTimer()
    with timer("gpu", torch.device("cuda")):
        pass
    assert timer.seconds() == {}
