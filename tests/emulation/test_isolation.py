"""Emulated clusters of an ordinary user and of root: they start, and leave nothing behind."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.quick import slow_but

NOBODY = 65534
DEADLINE = 120
"""Seconds after which a test gives up: a guard against hangs, not a bound on speed."""


def python() -> str:
    """Return an interpreter that any user may run: root's own may lie in a private directory."""
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    for found in (sys.executable, *filter(None, [shutil.which("python3", path=os.defpath)])):
        code = "import sys; sys.exit(sys.version_info < (3, 10))"
        with contextlib.suppress(PermissionError):
            if subprocess.run([found, "-c", code], cwd="/", **user).returncode == 0:
                return found
    return sys.executable


PYTHON = python()
LAUNCHER = [PYTHON, "-m", "emulation", "--topology", "2x2", "--rates", "node=4,gpu=20"]


def ordinary(command: list[str], as_root: bool = False) -> subprocess.Popen:
    """Return a prefix that runs a command as root, or as an ordinary user (the caller, or nobody)."""
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 and not as_root else {}
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        command, cwd="/", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **user
    )


def why_not() -> str | None:
    """Return why an ordinary user of this machine cannot create a cluster; empty if one can."""
    try:
        tried = ordinary([*LAUNCHER, "--", "true"])
    except PermissionError as error:
        return f"nobody may run the interpreter of these tests: {error}"
    _, error = tried.communicate(timeout=DEADLINE)
    return next((line for line in error.splitlines() if "an emulated cluster needs" in line), None)


reason = why_not()
needs_namespaces = pytest.mark.skipif(reason is not None, reason=reason or "")


@pytest.fixture
def marked() -> Iterator[tuple[str, Callable[[], list[int]]]]:
    """Return a marker for command lines, and a function that lists the processes that carry it."""
    with tempfile.TemporaryDirectory(prefix="cocodiff-ranks-") as word:

        def found() -> list[int]:
            running = []
            for process in filter(str.isdigit, os.listdir("/proc")):
                try:
                    if word in Path("/proc", process, "cmdline").read_text():
                        running.append(int(process))
                except OSError:  # processes come and go
                    continue
            return running

        yield word, found


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.02)


@needs_namespaces
def test_ranks_that_end_while_others_start_are_counted() -> None:
    """Python reaps the process of an object that is gone, and its status with it."""
    for command, status in 4 * [("true", 0), ("false", 1)]:
        launcher = ordinary([*LAUNCHER, "--", command])
        _, error = launcher.communicate(timeout=DEADLINE)
        assert launcher.returncode == status, error


@needs_namespaces
def test_files_that_ranks_write_belong_to_the_user() -> None:
    with tempfile.TemporaryDirectory(prefix="cocodiff-files-") as folder:
        os.chmod(folder, 0o777)
        program = f"import os; open(os.path.join({folder!r}, os.environ['RANK']), 'w')"
        launcher = ordinary([*LAUNCHER, "--", PYTHON, "-c", program])
        _, error = launcher.communicate(timeout=DEADLINE)
        assert launcher.returncode == 0, error
        owners = {(entry.name, entry.stat().st_uid) for entry in os.scandir(folder)}
    assert owners == {(str(rank), NOBODY if os.geteuid() == 0 else os.geteuid()) for rank in range(4)}


WAITING = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]], start_new_session=True)
os.write(1, b"here\\n")  # at once: lines of ranks do not mix
time.sleep(600)
"""


def waiting(word: str, as_root: bool) -> subprocess.Popen:
    """Start a cluster whose ranks wait, each with a child in a session of its own."""
    launcher = ordinary([*LAUNCHER, "--", PYTHON, "-c", WAITING, word], as_root)
    for _ in range(4):
        assert "here" in launcher.stdout.readline()
    return launcher


def interfaces() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


ENDS = [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP]


@pytest.mark.alone
@needs_namespaces
@pytest.mark.parametrize(
    ("number", "as_root"),
    slow_but([(ENDS[0], False), (ENDS[1], True)], itertools.product(ENDS, [False, True])),
)
def test_no_process_survives_the_launcher(number: signal.Signals, as_root: bool, marked: tuple[str, Callable]) -> None:
    if as_root and os.geteuid() != 0:
        pytest.skip("these tests do not run as root")
    word, running = marked
    before = interfaces(), sorted(os.listdir("/run"))
    launcher = waiting(word, as_root)
    assert len(running()) >= 8
    assert (interfaces(), sorted(os.listdir("/run"))) == before
    launcher.send_signal(number)
    _, error = launcher.communicate(timeout=DEADLINE)
    if number == signal.SIGKILL:
        wait_for(lambda: not running())
    else:
        assert launcher.returncode == 128 + number
        assert error == f"emulated_cluster: stopped by {number.name}\n"
        assert not running()
    assert (interfaces(), sorted(os.listdir("/run"))) == before
