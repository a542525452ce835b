"""Runs the facts of a command in processes of their own: a crash or a hang of one does not end the others."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.one_gpu.table import COMMANDS, Fact
from xfuser_cocodiff.xdit.settings.options import SHARE_VARIABLE

Row = dict[str, Any]
"""JSON values."""
FACTS_FILE = "facts.jsonl"
OK, FAILED, NOT_AVAILABLE, OUT_OF_TIME = "ok", "failed", "not available", "out of time"
NOT_AVAILABLE_STATUS = 3
"""Exit status of a fact for which this machine lacks something."""
_STATUSES = {0: OK, None: OUT_OF_TIME, NOT_AVAILABLE_STATUS: NOT_AVAILABLE}
_LAST_LINES = 15
"""Lines of output that stand for the cause of a failure."""


def append(folder: Path, row: Row) -> None:
    """Append a line to the record, at once: the machine may end at any time."""
    with (folder / FACTS_FILE).open("a") as lines:
        lines.write(json.dumps(row) + "\n")
        lines.flush()
        os.fsync(lines.fileno())


class _Running:
    """The ranks of a fact, each in a process."""

    def __init__(self, fact: Fact, folder: Path, program: Sequence[str]) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        size, self.fact, self._started = str(fact.ranks), fact, time.monotonic()
        self._logs = [folder / f"{fact.name}{f'.rank{rank}' if rank else ''}.log" for rank in range(fact.ranks)]
        common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        common["PYTHONUNBUFFERED"] = "1"
        if fact.ranks > 1:
            common[SHARE_VARIABLE] = "1"
        self._processes = []
        for rank, file in enumerate(self._logs):
            environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [*program, "--fact", fact.name]
            with file.open("w") as log:
                started = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            self._processes.append(started)

    def has_ended(self) -> bool:
        """Return whether all ranks have ended, or one has failed."""
        statuses = [process.poll() for process in self._processes]
        return any(statuses) or None not in statuses

    def end(self) -> Row:
        """Kill what is left of the ranks and of what they started, and return what became of the fact."""
        statuses = [process.poll() for process in self._processes]
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        rank = max(range(len(statuses)), key=lambda rank: (bool(statuses[rank]), statuses[rank] is None))
        status = _STATUSES.get(statuses[rank], FAILED)
        row: Row = {"fact": self.fact.name, "status": status, "seconds": round(time.monotonic() - self._started, 1)}
        if status != OK:
            said = self._logs[rank].read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
            row |= {"rank": rank, "exit_status": statuses[rank], "reason": "\n".join(said)}
        return row


def run(command: str, folder: Path, program: Sequence[str], patience: float = 1.0) -> list[str]:
    """Run the facts of a command and return the names of those that failed or were cut short.

    Args:
        command: key of COMMANDS.
        folder: folder of the record and of the output of each process.
        program: command line that measures a fact, to which `--fact NAME` is added.
        patience: factor on all time limits, above 1 where no machine is lent for minutes.
    """
    failed, ends, running = [], time.monotonic(), list[_Running]()
    try:
        for together in COMMANDS[command]:
            ends += patience * max(fact.seconds for fact in together)
            running += [_Running(fact, folder, program) for fact in together]
            while running:
                for each in [each for each in running if each.has_ended() or time.monotonic() > ends]:
                    running.remove(each)
                    row = each.end()
                    append(folder, {"command": command, **row})
                    print(f"one_gpu: {row['fact']}: {row['status']}, {row['seconds']:g} s", flush=True)
                    if row["status"] in (FAILED, OUT_OF_TIME):
                        failed.append(each.fact.name)
                time.sleep(0.05)
    finally:
        for each in running:
            each.end()
    return failed
