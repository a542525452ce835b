"""Tests of streams and events: kernels, waits and the host are ordered as on CUDA. Times are computed by hand."""

import random

import pytest

from benchmarks.accelerator.streams import Event, Stream
from benchmarks.accelerator.time_line import Instant


class Host:
    """A host whose launches and other calls take some time."""

    def __init__(self, launch_seconds: float = 0.0, call_seconds: float = 0.0) -> None:
        self.host_time, self.num_steps = Instant(), 1
        self.streams = [Stream(self)]
        self._launch_seconds, self._call_seconds = launch_seconds, call_seconds
        Event.host = self

    def launch(self, stream: Stream, seconds: float) -> None:
        self.host_time = self.host_time.after(self._launch_seconds)
        stream.launch(seconds)

    def spend_call_time(self) -> None:
        self.host_time = self.host_time.after(self._call_seconds)


def test_a_slow_host_delays_short_kernels_and_not_long_ones() -> None:
    host = Host(launch_seconds=2)
    main = host.streams[0]
    for _ in range(5):
        host.launch(main, 1)
    assert main.tail.floor == 5 * 2 + 1  # the device waits for each launch
    for _ in range(5):
        host.launch(main, 4)
    assert main.tail.floor == 12 + 5 * 4  # from the first of them on, the host is ahead
    assert host.host_time.floor == 20


def test_an_event_orders_two_streams() -> None:
    host = Host()
    main, side = host.streams[0], Stream(host)
    host.launch(main, 3)
    ready = main.record_event()
    host.launch(main, 10)
    side.wait_event(ready)
    host.launch(side, 2)
    assert side.tail.floor == 3 + 2
    assert main.tail.floor == 3 + 10 + 2  # the kernel of the side stream takes its turn
    end = side.record_event()
    host.launch(side, 20)
    main.wait_event(end)
    host.launch(main, 1)
    assert main.tail.floor == 15 + 20 + 1


def test_only_synchronization_makes_the_host_wait() -> None:
    host = Host(launch_seconds=1, call_seconds=0.25)
    main, side = host.streams[0], Stream(host)
    host.launch(main, 10)
    end = main.record_event()
    host.launch(main, 10)
    side.wait_event(end)
    assert host.host_time.floor == 2 * 1 + 2 * 0.25
    end.synchronize()
    assert host.host_time.floor == 1 + 10
    main.synchronize()
    assert host.host_time.floor == 1 + 20
    host.launch(side, 1)
    assert side.tail.floor == 1 + 20 + 1 + 1


def simulated(calls: list[tuple], launch_seconds: float) -> list[float]:
    """Return the ends of streams beside which nothing computes: each takes what is next in its queue, once it can."""
    queues: list[list[tuple]] = [[], [], []]
    now = 0.0
    for call in calls:
        now += launch_seconds if call[0] == "kernel" else 0.0
        queues[call[1]].append((*call, now))
    ends, passed = [0.0, 0.0, 0.0], dict[int, float]()
    while any(queues):
        for stream, queue in enumerate(queues):
            if queue and (queue[0][0] != "wait" or queue[0][2] in passed):
                kind, _, what, queued = queue.pop(0)
                if kind == "kernel":
                    ends[stream] = max(ends[stream], queued) + what
                elif kind == "record":
                    passed[what] = max(ends[stream], queued)
                else:
                    ends[stream] = max(ends[stream], passed[what])
    return ends


@pytest.mark.parametrize("launch_seconds", [0.0, 0.7, 5.0])
def test_random_streams_end_as_simulated(launch_seconds: float) -> None:
    for seed in range(100):
        choose = random.Random(seed)
        host = Host(launch_seconds)
        streams, events, calls = [Stream(host) for _ in range(3)], list[Event](), list[tuple]()
        for _ in range(40):
            number = choose.randrange(3)
            kind = choose.choice(["kernel", "kernel", "record", "wait"])
            if kind == "kernel":
                calls.append((kind, number, choose.choice([0.5, 1.0, 4.0])))
                host.launch(streams[number], calls[-1][2])
            elif kind == "record":
                calls.append((kind, number, len(events)))
                events.append(streams[number].record_event())
            elif events:
                calls.append((kind, number, choose.randrange(len(events))))
                streams[number].wait_event(events[calls[-1][2]])
        ends = simulated(calls, launch_seconds)
        for stream, end in zip(streams, ends, strict=True):
            assert stream.tail.floor == pytest.approx(end), seed
