"""Runs the facts of a stage: a line of JSON after each, within a time limit, leaving out what is known already."""

import json
import os
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from xfuser_cocodiff.lab.one_gpu.fact import Fact, Result

STAGE_SECONDS = 540.0
"""Time limit of a stage: nine minutes, a minute less than such a machine gives a command."""
FACTS_FILE = "facts.jsonl"
OK, FAILED, NOT_AVAILABLE, OUT_OF_TIME = "ok", "failed", "not available", "out of time"
_LEAST_SECONDS = 5.0
"""A fact does not start with less time than this."""
Measure = Callable[[Fact, float], Result]
"""Measures a fact within a time limit in seconds; returns `status`, with `result` or `reason`, and never raises."""


def run_stage(
    stage: str, facts: Sequence[Fact], folder: Path, measure: Measure, limit: float = STAGE_SECONDS
) -> list[str]:
    """Run the facts of a stage that are not known yet, and return the names of those that failed.

    A fact that fails does not stop the others. Facts for which there is no time are left to the next call.

    Args:
        stage: name of the stage.
        facts: its facts, in their order.
        folder: folder of the results, created if missing.
        measure: measures one fact.
        limit: time limit of the stage in seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known, ends, failed = known_facts(folder), time.monotonic() + limit, []
    for fact in facts:
        if known.get(fact.name, {}).get("status") == OK:
            print(f"== {stage} {fact.name}: known", flush=True)
            continue
        started = time.monotonic()
        if (left := ends - started) < _LEAST_SECONDS:
            outcome: Result = {"status": OUT_OF_TIME, "reason": f"stage {stage} may take {limit:g} s; call it again"}
        else:
            outcome = measure(fact, min(fact.seconds, left))
        line = {"stage": stage, "fact": fact.name, "seconds": round(time.monotonic() - started, 1), **outcome}
        _append(folder / FACTS_FILE, line)
        print(f"== {stage} {fact.name}: {outcome['status']}: {outcome.get('reason', 'see ' + FACTS_FILE)}", flush=True)
        if outcome["status"] in (FAILED, OUT_OF_TIME):
            failed.append(fact.name)
    _pack(stage, folder)
    return failed


def known_facts(folder: Path) -> dict[str, Result]:
    """Return the latest line of each fact by name; a line that an interruption cut short is left out."""
    known: dict[str, Result] = {}
    file = folder / FACTS_FILE
    for text in file.read_text().splitlines() if file.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        known[line["fact"]] = line
    return known


def _append(file: Path, line: Result) -> None:
    """Append a line that survives the loss of the machine; it begins on a new line if one was cut short."""
    with file.open("a+") as lines:
        lines.seek(max(0, lines.seek(0, os.SEEK_END) - 1))
        is_cut = lines.read(1) not in ("", "\n")
        lines.write("\n" * is_cut + json.dumps(line) + "\n")
        lines.flush()
        os.fsync(lines.fileno())


def _pack(stage: str, folder: Path) -> None:
    """Write all results so far into one archive."""
    with tarfile.open(folder / f"stage-{stage}.tar.gz", "w:gz") as archive:
        for file in sorted(folder.iterdir()):
            if file.is_file() and not file.name.endswith(".tar.gz"):
                archive.add(file, file.name)
