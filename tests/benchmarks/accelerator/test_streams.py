"""Tests of streams and events: kernels, waits and the host are ordered as on CUDA. Times are computed by hand."""

from benchmarks.accelerator.clock import Clock, Stream
from xfuser_cocodiff.tools.accelerator.accelerators import Accelerator


def new_clock(launch_seconds: float = 0.0) -> Clock:
    """Return the times of a host whose launches take some time, and other calls an eighth of it."""
    return Clock(Accelerator("test", 1e9, 1e9, 1e9, 1e9, 0.0, launch_seconds, 0.0))


def launch(clock: Clock, stream: Stream, seconds: float) -> None:
    with stream:
        clock.launch(seconds)


def test_a_slow_host_delays_short_kernels_and_not_long_ones() -> None:
    host = new_clock(2)
    main = host.streams[0]
    for _ in range(5):
        launch(host, main, 1)
    assert main.tail.floor == 5 * 2 + 1  # the device waits for each launch
    for _ in range(5):
        launch(host, main, 4)
    assert main.tail.floor == 12 + 5 * 4  # from the first of them on, the host is ahead
    assert host.host_time.floor == 20


def test_an_event_orders_two_streams() -> None:
    host = new_clock()
    main, side = host.streams[0], Stream(host)
    launch(host, main, 3)
    ready = main.record_event()
    launch(host, main, 10)
    side.wait_event(ready)
    launch(host, side, 2)
    assert side.tail.floor == 3 + 2
    assert main.tail.floor == 3 + 10 + 2  # the kernel of the side stream takes its turn
    end = side.record_event()
    launch(host, side, 20)
    main.wait_event(end)
    launch(host, main, 1)
    assert main.tail.floor == 15 + 20 + 1


def test_only_synchronization_makes_the_host_wait() -> None:
    host = new_clock(1)
    main, side = host.streams[0], Stream(host)
    launch(host, main, 10)
    end = main.record_event()
    launch(host, main, 10)
    side.wait_event(end)
    assert host.host_time.floor == 2 * 1 + 2 / 8
    end.synchronize()
    assert host.host_time.floor == 1 + 10
    main.synchronize()
    assert host.host_time.floor == 1 + 20
    launch(host, side, 1)
    assert side.tail.floor == 1 + 20 + 1 + 1
