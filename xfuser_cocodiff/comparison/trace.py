"""What the traces of the ranks tell of overlap on a device.

The format is Chrome's, for ui.perfetto.dev or chrome://tracing.
"""

import bisect
import gzip
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_EXCHANGE = re.compile(r"cocodiff\.(\w+)\.exchange")

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a device does; each carries the number of its launch, as the launch does."""

Interval = tuple[float, float]
"""Begin and end."""


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
        rank = _Rank(events)
        for event in events:
            named = _EXCHANGE.fullmatch(event.get("name", ""))
            if named and event.get("cat") == "user_annotation" and (work := rank.launched_in(event)):
                begin, end = min(each["ts"] for each in work), max(each["ts"] + each["dur"] for each in work)
                seconds[named[1]] += end - begin
                for start, stop in rank.busy_beside(frozenset(each["tid"] for each in work)):
                    hidden[named[1]] += max(0.0, min(end, stop) - max(begin, start))
    return {what: hidden[what] / seconds[what] for what in seconds if seconds[what]}


class _Rank:
    """What a process had its device do."""

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        numbered = [event for event in events if "correlation" in event.get("args", {})]
        self._done = {event["args"]["correlation"]: event for event in numbered if event.get("cat") in _ON_DEVICE}
        self._launches: defaultdict[tuple, list[tuple[float, int]]] = defaultdict(list)
        for event in numbered:
            number = event["args"]["correlation"]
            if event.get("cat") not in _ON_DEVICE and number in self._done:
                self._launches[event["pid"], event["tid"]].append((event["ts"], number))
        for launches in self._launches.values():
            launches.sort()
        self._busy: dict[frozenset[int], list[Interval]] = {}

    def launched_in(self, span: dict[str, Any]) -> list[dict[str, Any]]:
        """What the device did of what was launched within a range of a thread."""
        launches = self._launches[span["pid"], span["tid"]]
        first = bisect.bisect_left(launches, (span["ts"], -1))
        ended = span["ts"] + span["dur"]
        return [self._done[number] for ts, number in itertools.takewhile(lambda one: one[0] <= ended, launches[first:])]

    def busy_beside(self, streams: frozenset[int]) -> list[Interval]:
        """When kernels ran on other streams."""
        if streams not in self._busy:
            kernels = [each for each in self._done.values() if each["cat"] == "kernel" and each["tid"] not in streams]
            self._busy[streams] = _union((each["ts"], each["ts"] + each["dur"]) for each in kernels)
        return self._busy[streams]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times, in intervals that do not overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged
