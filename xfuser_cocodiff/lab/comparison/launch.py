"""Runs recorded launches of xDiT: output in a log, progress on the console, its processes stopped with ours."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from xfuser_cocodiff.engine.settings.options import RECORD_VARIABLE
from xfuser_cocodiff.lab.reporting.progress import ProgressReporter

POLL_SECONDS = 0.2
PATIENCE_SECONDS = 40
"""How long a launch may take to stop; torchrun gives its ranks 30 seconds."""
TAIL_LINES = 25

# The last line of a traceback, perhaps behind the rank's name; what torchrun says of it afterwards is no news.
_ERROR = re.compile(r"^(?:\[[^\]]+\]:?\s*)*((?!\S*ChildFailedError)[\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)


class LaunchError(RuntimeError):
    """A launch of xDiT failed."""


def run(name: str, command: Sequence[str], environment: Mapping[str, str], out: Path, console: Console) -> Path:
    """Run a command to its end with recording on, within :func:`exit_on_sigterm`.

    Args:
        name: what to call the launch on the console.
        command: program and arguments.
        environment: of the command; the variable that turns on recording is added.
        out: folder of the comparison, for records and logs.
        console: where start, progress and end are told.

    Returns:
        The folder with the records of its ranks, which is a fresh one.

    Raises:
        LaunchError: it failed; holds its error and the end of its log.
    """
    folder = out / "records" / name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    log = out / "logs" / f"{folder.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    started, progress, last_run = time.monotonic(), ProgressReporter(None if console.quiet else console.file), 0
    console.print(f"{name}: started, output in {log}")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**environment, RECORD_VARIABLE: str(folder.resolve())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                if found := read_progress(folder / "progress.json"):
                    what = f"{name}: run {found['run']}, step {found['step']} of {found['total_steps'] or '?'}"
                    progress.report(what, is_new=found["run"] > last_run)
                    last_run = found["run"]
                time.sleep(POLL_SECONDS)
        finally:
            stop(process)
            progress.close()
    if process.returncode != 0:
        raise LaunchError(_explain(name, process.returncode, log))
    console.print(f"{name}: done in {time.monotonic() - started:.0f} s")
    return folder


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Context in which SIGTERM leaves as an exception, so that it stops a launch as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop(process: subprocess.Popen) -> None:
    """End a process and its group if it still runs: first politely, so that launchers can stop their ranks."""
    for how, patience in ((signal.SIGTERM, PATIENCE_SECONDS), (signal.SIGKILL, None)):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)


def read_progress(file: Path) -> dict | None:
    """What rank 0 last said about where it is; None before its first step."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def _explain(name: str, status: int, log: Path) -> str:
    text = log.read_text(errors="replace")
    how = f"was killed by signal {-status}" if status < 0 else f"failed with exit status {status}"
    error = max(_ERROR.finditer(text), key=re.Match.end, default=None)
    # torchrun's summary after the error names ranks and exit codes, and pushes the traceback out of sight.
    lines = text[: error.end() if error else None].splitlines()[-TAIL_LINES:]
    cause = f": {error[1]}" if error else ""
    return "\n".join([f"the {name} launch {how}{cause}", "", f"From {log}:", "", *lines])
