"""One trace of all ranks from those that each of them left: Chrome's format, for ui.perfetto.dev or chrome://tracing."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NANOSECONDS = 1000
"""In a microsecond, the unit of times in a trace."""


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
