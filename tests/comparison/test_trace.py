"""What a trace tells, and what is in it on an accelerator."""

import gzip
import itertools
import json
import random
from pathlib import Path

import pytest
import torch

from xfuser_cocodiff.comparison import trace
from xfuser_cocodiff.exchange.traffic import Label, Traffic

HOST, DEVICE, THREAD = 4711, 0, 1
_numbers = itertools.count(1)


def span(name: str, begin: int, end: int, thread: int = THREAD, category: str = "user_annotation") -> dict:
    """A range of a thread."""
    place = {"ph": "X", "pid": HOST, "tid": thread}
    return {**place, "cat": category, "name": name, "ts": begin, "dur": end - begin}


def work(category: str, stream: int, begin: int, end: int, launched: int, thread: int = THREAD) -> list[dict]:
    """What a device did, and its launch, as Kineto writes them."""
    number = {"args": {"correlation": next(_numbers)}}
    launch = {**span("cudaLaunchKernel", launched, launched + 1, thread, "cuda_runtime"), **number}
    return [launch, {**launch, "cat": category, "pid": DEVICE, "tid": stream, "ts": begin, "dur": end - begin}]


def write(file: Path, events: list[dict]) -> Path:
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return file


def test_overlap_is_that_of_single_moments(tmp_path: Path) -> None:
    """Kernels on two streams and exchanges on a third, at random, against one moment after the other."""
    rng, events, busy, exchanges = random.Random(0), [], set(), []
    for _ in range(40):
        begin = rng.randrange(300)
        end = begin + rng.randrange(1, 12)
        busy |= set(range(begin, end))
        events += work("kernel", rng.choice([7, 13]), begin, end, launched=begin - 5)
    for index in range(20):  # each a copy to the host and one back, between which its stream does nothing
        begin, launched = rng.randrange(300), 1000 + 10 * index
        middle, end = begin + rng.randrange(1, 9), begin + rng.randrange(10, 20)
        exchanges.append(range(begin, end))
        events.append(span("cocodiff.v.exchange", launched, launched + 8, thread=2))
        events.append(span("cocodiff.node", launched + 1, launched + 3, thread=2))
        events += work("gpu_memcpy", 20, begin, middle, launched + 1, thread=2)
        events += work("kernel", 20, end - 1, end, launched + 6, thread=2)
    rng.shuffle(events)
    hidden = sum(moment in busy for moments in exchanges for moment in moments)
    found = trace.overlaps([write(tmp_path / "trace.json.gz", events)])
    assert found == {"v": pytest.approx(hidden / sum(map(len, exchanges)))}
    assert 0 < found["v"] < 1


def exchanging(busy: bool) -> list[dict]:
    """A rank's exchanges, behind which its device computes, or not."""
    return [
        {"ph": "M", "name": "process_name", "pid": HOST, "args": {"name": "python"}},
        span("cocodiff.v.exchange", 0, 9),
        *work("kernel", 20, 100, 110, launched=1),
        span("cocodiff.v.wait", 10, 19),
        *(work("kernel", 7, 105, 130, launched=12) if busy else []),
        span("cocodiff.qk.exchange", 20, 29),
        *work("kernel", 20, 120, 130, launched=21),
        span("cocodiff.o.exchange", 40, 49),  # of which the device did nothing
        span("cocodiff.v.exchange", 60, 69, category="gpu_user_annotation"),
    ]


def test_kinds_and_ranks_are_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = []
    for rank, busy in enumerate((True, False)):
        monkeypatch.setitem(globals(), "_numbers", itertools.count(1))  # every process has the same ones
        files.append(write(tmp_path / f"trace{rank}.json.gz", exchanging(busy)))
    assert [trace.overlaps([file]) for file in files] == [{"v": 0.5, "qk": 1.0}, {"v": 0.0, "qk": 0.0}]
    assert trace.overlaps(files) == {"v": 0.25, "qk": 0.5}


def test_on_an_accelerator_a_profiler_sees_ranges_and_nobody_takes_times() -> None:
    traffic = Traffic(timed=True)
    with torch.profiler.profile() as profiler:
        span = traffic.span(Label("v"), torch.device("cuda"))
        with span.travels(), span.holds():
            pass
    assert {"cocodiff.v.exchange", "cocodiff.v.wait"} <= {one.name for one in profiler.events()}
    assert (span.taken, traffic.spans) == (False, [])
