"""What the traces of the ranks tell of overlap on a device.

The format is Chrome's, for ui.perfetto.dev or chrome://tracing.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_EXCHANGE = re.compile(r"cocodiff\.(\w+)\.exchange")

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a device does; each carries the number of its launch, as the launch does."""


def files(folder: Path) -> list[Path]:
    """Return the traces that the ranks of a launch left, by rank."""
    return sorted(folder.glob("trace*.json.gz"), key=lambda file: int("".join(filter(str.isdigit, file.name))))


def overlaps(traces: Sequence[Path]) -> dict[str, float]:
    """Return how much of the exchanges passed while kernels ran on other streams, as the device's own clock has it.

    What an exchange is on a device is found by what the host has launched within the exchange's range: a device's own
    ranges tell the innermost one only.

    Args:
        traces: of all ranks, gzipped.

    Returns:
        For each kind of exchange, named by what it brings, a share of its time; empty where no device was traced.
    """
    seconds: Counter[str] = Counter()
    hidden: Counter[str] = Counter()
    for file in traces:
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        numbered = [event for event in events if "correlation" in event.get("args", {})]
        done = {event["args"]["correlation"]: event for event in numbered if event.get("cat") in _ON_DEVICE}
        launches = [event for event in numbered if event.get("cat") not in _ON_DEVICE]
        kernels = sorted((event for event in done.values() if event["cat"] == "kernel"), key=lambda event: event["ts"])
        for span in events:
            named = _EXCHANGE.fullmatch(span.get("name", ""))
            if named is None or span.get("cat") != "user_annotation":
                continue
            inside = [launch for launch in launches if _is_inside(launch, span)]
            work = [done[number] for launch in inside if (number := launch["args"]["correlation"]) in done]
            if not work:
                continue
            begin, end = min(each["ts"] for each in work), max(map(_end, work))
            streams = {each["tid"] for each in work}
            seconds[named[1]] += end - begin
            until = begin
            for kernel in kernels:
                if kernel["tid"] not in streams:
                    hidden[named[1]] += max(0.0, min(_end(kernel), end) - max(kernel["ts"], until))
                    until = max(until, _end(kernel))
    return {what: hidden[what] / seconds[what] for what in seconds if seconds[what]}


def _is_inside(event: dict[str, Any], span: dict[str, Any]) -> bool:
    """Whether an event began within a range of its thread."""
    same_thread = (event["pid"], event["tid"]) == (span["pid"], span["tid"])
    return same_thread and span["ts"] <= event["ts"] <= _end(span)


def _end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]
