"""Measures from traces how much communication overlaps with kernels on an accelerator.

Traces are in Chrome's format, for ui.perfetto.dev or chrome://tracing.
"""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_EXCHANGE = re.compile(r"cocodiff\.(\w+)\.exchange")

_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of device events. A device event and its launch on the host have the same correlation number."""


def files(folder: Path) -> list[Path]:
    """Return the trace files that the ranks of a launch wrote, by rank."""
    return sorted(folder.glob("trace*.json.gz"), key=lambda file: int("".join(filter(str.isdigit, file.name))))


def overlaps(traces: Sequence[Path]) -> dict[str, float]:
    """Return the fraction of communication time in which kernels ran on other streams, by the device's clock.

    The device events of an all-to-all are those whose launches lie within its range on the host. The ranges on the
    device itself do not suffice, since Kineto records only the innermost one.

    Args:
        traces: gzipped trace files of all ranks.

    Returns:
        By the tensors that are sent ("v", "qk", "o"), the hidden fraction of their communication; empty if no device
        was traced.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    hidden: defaultdict[str, float] = defaultdict(float)
    for file in traces:
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        correlated = [event for event in events if "correlation" in event.get("args", {})]
        launches = [event for event in correlated if event.get("cat") not in _DEVICE_CATEGORIES]
        on_device = {_correlation(event): event for event in correlated if event.get("cat") in _DEVICE_CATEGORIES}
        kernels = sorted(
            (event for event in on_device.values() if event["cat"] == "kernel"), key=lambda event: event["ts"]
        )
        for span in events:
            match = _EXCHANGE.fullmatch(span.get("name", ""))
            if match is None or span.get("cat") != "user_annotation":
                continue
            inside = [_correlation(launch) for launch in launches if _is_inside(launch, span)]
            if own_events := [on_device[number] for number in inside if number in on_device]:
                begin, end = min(event["ts"] for event in own_events), max(map(_end, own_events))
                streams = {event["tid"] for event in own_events}
                others = [kernel for kernel in kernels if kernel["tid"] not in streams]
                seconds[match[1]] += end - begin
                hidden[match[1]] += _covered(begin, end, others)
    return {tensors: hidden[tensors] / seconds[tensors] for tensors in seconds if seconds[tensors]}


def _covered(begin: float, end: float, kernels: Sequence[dict[str, Any]]) -> float:
    """Return how long at least one of the kernels, which are sorted by start, runs between two times."""
    covered, last_end = 0.0, begin
    for kernel in kernels:
        covered += max(0.0, min(_end(kernel), end) - max(kernel["ts"], last_end))
        last_end = max(last_end, _end(kernel))
    return covered


def _correlation(event: dict[str, Any]) -> int:
    return event["args"]["correlation"]


def _is_inside(event: dict[str, Any], span: dict[str, Any]) -> bool:
    """Return whether an event began within a range of its thread."""
    same_thread = (event["pid"], event["tid"]) == (span["pid"], span["tid"])
    return same_thread and span["ts"] <= event["ts"] <= _end(span)


def _end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]
