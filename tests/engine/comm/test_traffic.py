"""Traffic statistics, from given times and bytes."""

from unittest import mock

import pytest
import torch

from xfuser_cocodiff.engine.comm.traffic import Label, Span, Traffic


def test_time_in_flight_counts_once_and_waits_are_exposed() -> None:
    traffic = Traffic(timed=True)
    # V from 0 to 4 s, Q and K within from 1 to 3 s, O from 6 to 7 s after a pause; the caller waited for 2 s in all.
    for tensors, begin, end, exposed in (("v", 0.0, 4.0, 0.5), ("qk", 1.0, 3.0, 0.5), ("o", 6.0, 7.0, 1.0)):
        traffic.spans.append(Span(Label(tensors, "blocks.0"), begin=begin, end=end, exposed_seconds=exposed))
    traffic.spans.append(Span(Label("o", "blocks.1"), begin=6.5, end=8.5, exposed_seconds=2.0))
    assert traffic.hidden_by_layer() == {"blocks.0": (5.0, 3.0), "blocks.1": (2.0, 0.0)}
    assert traffic.hidden_seconds == 3.0


def test_bytes_are_those_for_other_ranks() -> None:
    traffic = Traffic()
    traffic.count("node", 4, torch.zeros(4, 25))
    traffic.count_bytes("node", 3, 10)
    assert (traffic.sent_bytes, traffic.calls) == ({"node": 300 + 20}, {"node": 2})


def test_events_count_milliseconds() -> None:
    traffic = Traffic(timed=True)
    start = mock.Mock(**{"elapsed_time.return_value": 250.0})  # as torch.Event, in milliseconds
    traffic._pending += [("gpu", start, mock.Mock()), ("gpu", start, mock.Mock())]
    assert traffic.seconds == pytest.approx({"gpu": 0.5})
    assert traffic.seconds == pytest.approx({"gpu": 0.5})  # and each once


def test_collectives_in_a_graph_capture_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that is recorded in a capture has no time, and CUDA raises if it is read."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch, "Event", mock.Mock(side_effect=AssertionError("recorded in a graph")))
    traffic = Traffic(timed=True)
    traffic.record_end("gpu", traffic.record_start(torch.device("cuda")))
    assert traffic.seconds == {}
