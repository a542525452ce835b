"""Runs facts and ranks in processes of their own: a crash of one, or of its CUDA context, does not end the others."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from xfuser_cocodiff.lab.one_gpu import mps
from xfuser_cocodiff.lab.one_gpu.fact import Fact, NotAvailableError, Result, Setting
from xfuser_cocodiff.lab.one_gpu.runner import FAILED, NOT_AVAILABLE, OK

END_SECONDS = 20.0
"""How long killed processes may take to end."""
LAST_LINES = 15
"""Lines of output that stand for the cause of a failure."""


def outcome_of(fact: Fact, setting: Setting) -> Result:
    """Measure a fact in this process and return its outcome, whatever happens."""
    try:
        return {"status": OK, "result": dict(fact.measure(setting))}
    except NotAvailableError as error:
        return {"status": NOT_AVAILABLE, "reason": str(error)}
    except Exception as error:
        return {"status": FAILED, "reason": f"{type(error).__name__}: {error}"}


_DRY_RUN_FACTOR = 4
"""Limit of a fact in a dry run over its limit on a GPU: ranks share a few cores with all else that runs."""


def measure(fact: Fact, seconds: float, folder: Path, stage: str, is_dry_run: bool) -> Result:
    """Measure a fact in a process of its own, whose output goes to a log file, and return its outcome."""
    result = folder / f"{fact.name}.outcome"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "xfuser_cocodiff.lab.one_gpu", str(folder), stage, "--fact", fact.name]
    try:
        limit = _DRY_RUN_FACTOR * seconds if is_dry_run else seconds
        output = run_command([*command, *(["--dry-run"] if is_dry_run else [])], limit)
    except RuntimeError as error:
        output = str(error)
        return {"status": FAILED, "reason": output}
    finally:
        (folder / f"{fact.name}.log").write_text(output)
    try:
        return json.loads(result.read_text())
    except (OSError, ValueError):
        return {"status": FAILED, "reason": f"no result; it wrote: {last_lines(output)}"}
    finally:
        result.unlink(missing_ok=True)


def run_command(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output. Its processes end with it.

    Raises:
        RuntimeError: it failed or took longer than `seconds`; names the last lines of its output.
    """
    process = subprocess.Popen(
        command,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(process.pid)
        output = process.communicate()[0]
        raise RuntimeError(f"took longer than {seconds:.0f} s: {last_lines(output)}") from None
    finally:
        kill(process.pid)
        _wait_for_end(process.pid)
        mps.end(process.pid)
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}: {last_lines(output)}")
    return output


def kill(leader: int) -> None:
    """Kill all processes of a session, given the process that leads it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _wait_for_end(leader: int) -> None:
    """Wait until killed processes of a group are gone: a rank may hold the GPU until its kernels have ended."""
    ends = time.monotonic() + END_SECONDS
    while leader in set(_groups()) and time.monotonic() < ends:
        time.sleep(0.1)


def _groups() -> Iterator[int]:
    """Yield the process group of each process except zombies."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, group, *_ = stat.read_text().rpartition(")")[2].split()
            if state != "Z":
                yield int(group)


def last_lines(output: str) -> str:
    """Return the last lines of an output."""
    return "\n".join(output.strip().splitlines()[-LAST_LINES:])
