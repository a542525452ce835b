"""What a trace tells, and what is in it on an accelerator."""

import gzip
import json
import random
from pathlib import Path

import pytest
import torch

from xfuser_cocodiff.bench import trace
from xfuser_cocodiff.traffic import Label, Traffic


def event(category: str, name: str, process: int, stream: int, begin: int, end: int) -> dict:
    place = {"ph": "X", "pid": process, "tid": stream}
    return {**place, "cat": category, "name": name, "ts": begin, "dur": end - begin}


def write(file: Path, events: list[dict]) -> Path:
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return file


def test_overlap_is_that_of_single_moments(tmp_path: Path) -> None:
    """Kernels and exchanges at random, against one moment after the other."""
    rng, events = random.Random(0), []
    for _ in range(60):
        begin = rng.randrange(300)
        kind = rng.choice([("kernel", "gemm"), ("gpu_memcpy", "copy"), ("gpu_user_annotation", "cocodiff.v.exchange")])
        events.append(event(*kind, rng.randrange(2), rng.randrange(3), begin, begin + rng.randrange(1, 12)))
    moments = {
        category: [
            (each["pid"], each["tid"], moment)
            for each in events
            if each["cat"] == category
            for moment in range(each["ts"], each["ts"] + each["dur"])
        ]
        for category in ("kernel", "gpu_user_annotation")
    }
    hidden = sum(
        any((process, other, moment) in moments["kernel"] for other in range(3) if other != stream)
        for process, stream, moment in moments["gpu_user_annotation"]
    )
    found = trace.overlaps(write(tmp_path / "trace.json.gz", events))
    assert found == {"v": pytest.approx(hidden / len(moments["gpu_user_annotation"]))}
    assert 0 < found["v"] < 1


def test_kinds_are_apart_and_other_ranges_are_no_exchanges(tmp_path: Path) -> None:
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        event("gpu_user_annotation", "cocodiff.v.exchange", 0, 7, 0, 10),
        event("gpu_user_annotation", "cocodiff.qk.exchange", 0, 7, 20, 30),
        event("gpu_user_annotation", "cocodiff.v.wait", 0, 1, 0, 10),
        event("user_annotation", "cocodiff.o.exchange", 0, 1, 0, 10),  # as the host sees it
        event("kernel", "gemm", 0, 1, 5, 30),
    ]
    file = write(tmp_path / "trace0.json.gz", events)
    assert trace.overlaps(file) == {"v": 0.5, "qk": 1.0}
    trace.merge([file, file], tmp_path / "trace.json.gz")
    assert trace.overlaps(tmp_path / "trace.json.gz") == {"v": 0.5, "qk": 1.0}


def test_on_an_accelerator_a_profiler_sees_ranges_and_nobody_takes_times() -> None:
    traffic = Traffic(timed=True)
    with torch.profiler.profile() as profiler:
        span = traffic.span(Label("v"), torch.device("cuda"))
        with span.travels(), span.holds():
            pass
    assert {"cocodiff.v.exchange", "cocodiff.v.wait"} <= {one.name for one in profiler.events()}
    assert (span.taken, traffic.spans) == (False, [])
