"""Runs recorded launches of xDiT: output in a log, progress on the console, processes stopped on interrupt."""

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

from xfuser_cocodiff.lab.reporting.progress import ProgressReporter
from xfuser_cocodiff.xdit.settings.variables import RECORD_VARIABLE

POLL_SECONDS = 0.2
TERMINATION_SECONDS = 40
"""Seconds until a launch that does not terminate is killed; torchrun gives its ranks 30."""
TAIL_LINES = 25

# The last line of a traceback, with or without the rank's prefix. torchrun's ChildFailedError only repeats it.
_ERROR = re.compile(r"^(?:\[[^\]]+\]:?\s*)*((?!\S*ChildFailedError)[\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)


class LaunchError(RuntimeError):
    """Error: a launch of xDiT failed."""


def run(name: str, command: Sequence[str], environment: Mapping[str, str], out: Path, console: Console) -> Path:
    """Run a command to its end with recording on, within :func:`exit_on_sigterm`.

    Args:
        name: of the launch, for the console and for its files.
        command: program and arguments.
        environment: of the command; the variable that turns recording on is added.
        out: folder of the comparison, for records and logs.
        console: to print start, progress and end on.

    Returns:
        The new folder with the records of its ranks.

    Raises:
        LaunchError: the command failed; the message has its error and the end of its log.
    """
    folder = out / "records" / name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    log = out / "logs" / f"{folder.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    console.print(f"{name}: started, output in {log}")
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**environment, RECORD_VARIABLE: str(folder.resolve())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        progress = ProgressReporter(None if console.quiet else console.file)
        try:
            _report_until_exit(process, name, folder / "progress.json", progress)
        finally:
            stop(process)
            progress.close()
    if process.returncode != 0:
        raise LaunchError(_describe_failure(name, process.returncode, log))
    console.print(f"{name}: done in {time.monotonic() - started:.0f} s")
    return folder


def _report_until_exit(process: subprocess.Popen, name: str, file: Path, progress: ProgressReporter) -> None:
    """Report the step that rank 0 has reached, until the process ends."""
    last_run = 0
    while process.poll() is None:
        if step := read_progress(file):
            text = f"{name}: run {step['run']}, step {step['step']} of {step['total_steps'] or '?'}"
            progress.report(text, is_new=step["run"] > last_run)
            last_run = step["run"]
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM within this context, so that it stops a launch as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop(process: subprocess.Popen) -> None:
    """Stop a process group that still runs: SIGTERM first, so that a launcher stops its ranks, then SIGKILL."""
    for number, seconds in ((signal.SIGTERM, TERMINATION_SECONDS), (signal.SIGKILL, None)):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)


def read_progress(file: Path) -> dict | None:
    """Read the run and step that rank 0 last recorded; None before its first step."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def _describe_failure(name: str, status: int, log: Path) -> str:
    """Return how a launch failed, with its error and the end of its log."""
    text = log.read_text(errors="replace")
    failure = f"was killed by signal {-status}" if status < 0 else f"failed with exit status {status}"
    error = max(_ERROR.finditer(text), key=re.Match.end, default=None)
    # torchrun's summary after the error lists ranks and exit codes; without it the traceback is in the last lines.
    lines = text[: error.end() if error else None].splitlines()[-TAIL_LINES:]
    cause = f": {error[1]}" if error else ""
    return "\n".join([f"the {name} launch {failure}{cause}", "", f"From {log}:", "", *lines])
