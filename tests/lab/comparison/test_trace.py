"""Overlap of communication and kernels, from traces."""

import gzip
import itertools
import json
import random
from pathlib import Path

import pytest

from xfuser_cocodiff.lab.comparison import trace

HOST, DEVICE, THREAD = 4711, 0, 1
_numbers = itertools.count(1)


def span(name: str, begin: int, end: int, thread: int = THREAD, category: str = "user_annotation") -> dict:
    """Return a range of a thread."""
    place = {"ph": "X", "pid": HOST, "tid": thread}
    return {**place, "cat": category, "name": name, "ts": begin, "dur": end - begin}


def work(category: str, stream: int, begin: int, end: int, launched: int, thread: int = THREAD) -> list[dict]:
    """Return a device event and its launch, as Kineto writes them."""
    number = {"args": {"correlation": next(_numbers)}}
    launch = {**span("cudaLaunchKernel", launched, launched + 1, thread, "cuda_runtime"), **number}
    return [launch, {**launch, "cat": category, "pid": DEVICE, "tid": stream, "ts": begin, "dur": end - begin}]


def traced(rng: random.Random) -> tuple[list[dict], dict[str, list[bool]]]:
    """Return random events of a rank: kernels on two streams, and all-to-alls on a third.

    Returns:
        The events, and by the tensors of an all-to-all, for each microsecond of it, whether a kernel ran.
    """
    events, busy, moments = [], set(), {"v": [], "qk": []}
    for _ in range(40):
        begin = rng.randrange(300)
        end = begin + rng.randrange(1, 12)
        busy |= set(range(begin, end))
        events += work("kernel", rng.choice([7, 13]), begin, end, launched=begin - 5)
    for index in range(20):  # each a copy to the host and one back, with an idle stream between them
        begin, launched, tensors = rng.randrange(300), 1000 + 10 * index, rng.choice([*moments])
        middle, end = begin + rng.randrange(1, 9), begin + rng.randrange(10, 20)
        moments[tensors] += range(begin, end)
        events.append(span(f"cocodiff.{tensors}.exchange", launched, launched + 8, thread=2))
        events.append(span("cocodiff.node", launched + 1, launched + 3, thread=2))
        events += work("gpu_memcpy", 20, begin, middle, launched + 1, thread=2)
        events += work("kernel", 20, end - 1, end, launched + 6, thread=2)
    events.append({"ph": "M", "name": "process_name", "pid": HOST, "args": {"name": "python"}})
    events.append(span("cocodiff.o.exchange", 9000, 9009))  # without device events
    events.append(span("cocodiff.v.exchange", 1000, 1009, category="gpu_user_annotation"))
    rng.shuffle(events)
    return events, {tensors: [moment in busy for moment in its] for tensors, its in moments.items()}


def test_overlap_equals_a_count_of_microseconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files, expected = [], {"v": [], "qk": []}
    for rank in range(2):
        monkeypatch.setitem(globals(), "_numbers", itertools.count(1))  # correlation numbers repeat in every process
        events, moments = traced(random.Random(rank))
        files.append(tmp_path / f"trace{rank}.json.gz")
        files[-1].write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
        for tensors, its in moments.items():
            expected[tensors] += its
    assert trace.files(tmp_path) == files
    assert trace.overlaps(files) == pytest.approx({tensors: sum(its) / len(its) for tensors, its in expected.items()})
