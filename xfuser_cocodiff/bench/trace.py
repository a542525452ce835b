"""One trace of all ranks from those that each of them left, and what it tells of overlap.

The format is Chrome's, for ui.perfetto.dev or chrome://tracing.
"""

import functools
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

NANOSECONDS = 1000
"""In a microsecond, the unit of times in a trace."""
_EXCHANGE = re.compile(r"cocodiff\.(\w+)\.exchange")

Interval = tuple[float, float]
"""Begin and end."""


def merge(traces: Sequence[Path], out: Path) -> None:
    """Write the traces of all ranks as one, in which every process is named by its rank.

    Args:
        traces: gzipped, of rank 0 and up.
        out: gzipped as well.
    """
    found = [json.loads(gzip.decompress(file.read_bytes())) for file in traces]
    start = found[0].get("baseTimeNanoseconds", 0)
    events: list[dict[str, Any]] = []
    for rank, trace in enumerate(found):
        late = (trace.get("baseTimeNanoseconds", 0) - start) / NANOSECONDS
        events += [_of_rank(event, rank, late) for event in trace["traceEvents"]]
    merged = {**found[0], "traceEvents": events}
    out.write_bytes(gzip.compress(json.dumps(merged).encode()))


def _of_rank(event: dict[str, Any], rank: int, late: float) -> dict[str, Any]:
    """An event with a process, a clock and identifiers that no other rank has."""
    moved = {**event, "pid": f"rank {rank}: {event.get('pid')}"}
    if "ts" in event:
        moved["ts"] = event["ts"] + late
    if "id" in event:
        moved["id"] = f"{rank}:{event['id']}"
    if event.get("name") == "process_name":
        moved["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
    return moved


def overlaps(trace: Path) -> dict[str, float]:
    """How much of the exchanges passed while kernels ran on other streams, as the device's own clock has it.

    Args:
        trace: of one rank or of all, gzipped.

    Returns:
        For each kind of exchange, named by what it brings, a share of its time; empty where no device was traced.
    """
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]

    @functools.cache
    def busy(process: str, stream: int) -> list[Interval]:
        """When other streams of a process run kernels."""
        return _union(_interval(kernel) for kernel in kernels if kernel["pid"] == process and kernel["tid"] != stream)

    seconds: Counter[str] = Counter()
    hidden: Counter[str] = Counter()
    for event in events:
        named = _EXCHANGE.fullmatch(event.get("name", ""))
        if named and event.get("cat") == "gpu_user_annotation":
            begin, end = _interval(event)
            seconds[named[1]] += end - begin
            for start, stop in busy(event["pid"], event["tid"]):
                hidden[named[1]] += max(0.0, min(end, stop) - max(begin, start))
    return {what: hidden[what] / seconds[what] for what in seconds if seconds[what]}


def _interval(event: dict[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times, in intervals that do not overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged
