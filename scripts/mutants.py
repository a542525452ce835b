#!/usr/bin/env python3
"""Plants the bugs of tests/mutants.toml, one at a time, and counts how many of them make a test fail.

Each one is planted in a temporary copy of the checkout, whose quick tests of the bug's package then run until one
fails: those of `tests` in the list, or else tests/a/b for xfuser_cocodiff/a/b/c.py. A bug survives if all of them pass,
and hangs if they have not ended after --guard seconds. If the test that fails does so without the bug too, the result
is "unsound". Run it in the environment of scripts/test.sh.

    python scripts/mutants.py                           # all of them, in a quarter of an hour
    python scripts/mutants.py --only 'engine/comm|ring' # those whose file or name matches
    python scripts/mutants.py --json mutants.json       # write results to a file, and skip those that it has
"""

import argparse
import atexit
import collections
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

try:
    import tomllib
except ImportError:  # Python 3.10, for which pytest brings the same under another name
    import tomli as tomllib  # type: ignore[no-redef]

ROOT, PACKAGE = Path(__file__).resolve().parents[1], "xfuser_cocodiff"
KILLED, SURVIVED, HUNG, UNSOUND = "killed", "survived", "hung", "unsound"
ENOUGH = 0.9
"""Fraction of the bugs that tests must notice."""
_LIBRARIES = ("torch", "numpy", "pytest", "hypothesis", "transformers", "diffusers.pipelines.pipeline_utils")
"""Libraries that take long to import, none of which imports the project or xDiT, which it patches."""
_NO_ENTRY_POINTS = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_ALL_PASSED, _NOTHING_RAN = 0, (3, 4, 5)
"""Exit statuses of pytest: success, and an internal error, an error of usage, and no tests."""


class Mutant(NamedTuple):
    """A planted bug."""

    name: str
    file: str
    """File in the package."""
    old: str
    new: str
    seen: str
    """What a user would see."""
    tests: tuple[str, ...] = ()
    """Tests to run; those of the file's package when not given."""

    @property
    def selection(self) -> tuple[str, ...]:
        """Tests that must notice the bug."""
        return self.tests or (str(Path("tests", self.file).parent),)

    def plant(self, text: str) -> str:
        """Return the content of the file with the bug.

        Raises:
            ValueError: the old text does not occur exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: the old text occurs {count} times in {self.file}; valid is once")
        return text.replace(self.old, self.new)


def read(file: Path = ROOT / "tests" / "mutants.toml") -> list[Mutant]:
    """Return all planted bugs."""
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry.get("tests", ()))}) for entry in entries]


def copy_checkout(target: Path) -> None:
    """Copy the files of the checkout that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, stdout=subprocess.PIPE
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(copy: Path, selection: tuple[str, ...], guard: float) -> tuple[str, str]:
    """Return what became of the bug in a copy, and the first test that failed.

    Tests run in a fork of this process, which has imported libraries, and nothing of the project.
    """
    with (copy / "output").open("w+") as output:
        if not (child := os.fork()):
            _run_here(copy, selection, output.fileno())
        status = _wait_for(child, guard)
        output.seek(0)
        text = output.read()
    if status is None:
        return HUNG, ""
    if status in _NOTHING_RAN:
        raise RuntimeError(f"no test has run:\n{text[-2000:]}")
    return (SURVIVED, "") if status == _ALL_PASSED else (KILLED, first_failed(text))


def first_failed(output: str) -> str:
    """Return the first test that failed by pytest's output; its parameters may have spaces."""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", output, re.MULTILINE)
    return failed[1] if failed else ""


def _run_here(copy: Path, selection: tuple[str, ...], output: int) -> NoReturn:
    """Run tests in this process, and end it with pytest's status."""
    import pytest
    import torch

    status = 3
    try:
        os.setsid()  # ranks too are in the session that ends with the guard
        for stream in (1, 2):
            os.dup2(output, stream)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path[:0] = [str(copy)]
        sys.modules["__main__"] = ModuleType("__main__")  # which ranks would import
        del os.environ[_NO_ENTRY_POINTS]
        torch._import_device_backends()  # those entry points, which were left out when PyTorch was imported
        status = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *selection]))
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)


def _wait_for(child: int, guard: float) -> int | None:
    """Return the exit status of a process, and end all of its session; None if it has not ended in time."""
    deadline, status = time.monotonic() + guard, None
    while status is None and time.monotonic() < deadline:
        ended, code = os.waitpid(child, os.WNOHANG)
        status = abs(os.waitstatus_to_exitcode(code)) if ended else None
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status


def prepare(hub: Path) -> None:
    """Hide accelerators, and import libraries that the tests need, once for all of them.

    Args:
        hub: folder of the small models, which all runs share.
    """
    hub.mkdir(exist_ok=True)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "CI": "1", _NO_ENTRY_POINTS: "0"}
    # As in tests/conftest.py, which leaves a worker the folder that it is given. Libraries read these at their import.
    os.environ |= {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", "PYTEST_XDIST_WORKER": "gw0", "TRITON_INTERPRET": "1"}
    for name in _LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def check_import(copy: Path) -> None:
    """Check that tests in a copy import its package, and so do processes that they start.

    Raises:
        RuntimeError: they import another one, such as the installed one.
    """
    (copy / "test_import.py").write_text(
        f"import subprocess, sys, {PACKAGE}\n"
        f"CODE = 'import {PACKAGE}; print({PACKAGE}.__file__)'\n"
        "def test_import():\n"
        "    started = subprocess.run([sys.executable, '-c', CODE], stdout=subprocess.PIPE, text=True).stdout\n"
        f"    for file in ({PACKAGE}.__file__, started):\n"
        f"        assert file.startswith({str(copy)!r})\n"
    )
    if run_tests(copy, ("test_import.py",), 600)[0] != SURVIVED:
        raise RuntimeError(f"tests in {copy} do not import its package:\n{(copy / 'output').read_text()}")


def run(mutants: list[Mutant], folder: Path, guard: float) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """Plant each bug in a copy of the checkout in a folder, and yield what became of it."""
    copy = folder / "copy"
    copy_checkout(copy)
    prepare(folder / "hub")
    check_import(copy)
    for mutant in mutants:
        file, original = copy / PACKAGE / mutant.file, ROOT / PACKAGE / mutant.file
        file.write_text(mutant.plant(original.read_text(encoding="utf-8")), encoding="utf-8")
        began = time.monotonic()
        result, by = run_tests(copy, mutant.selection, guard)
        shutil.copy2(original, file)
        if by and run_tests(copy, (by,), guard)[0] != SURVIVED:
            result = UNSOUND
        yield mutant, {"result": result, "by": by, "seconds": round(time.monotonic() - began)}


def summarize(results: dict[str, dict[str, Any]]) -> tuple[str, bool]:
    """Return the counts in words, and whether they suffice."""
    counts = collections.Counter(result["result"] for result in results.values())
    share = counts[KILLED] / max(1, len(results))
    text = f"{len(results)} bugs: " + ", ".join(f"{counts[each]} {each}" for each in (KILLED, SURVIVED, HUNG, UNSOUND))
    return f"{text}; {share:.0%} killed, valid are {ENOUGH:.0%} and none hung", share >= ENOUGH and not (
        counts[HUNG] or counts[UNSOUND]
    )


def main() -> int:
    """Run the bugs and return the exit status: 1 if too many survive, or one hangs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="REGEX", default="", help="run those whose file or name matches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep results in a file, to resume from")
    parser.add_argument("--guard", type=float, default=900, metavar="SECONDS", help="longest run (%(default)g s)")
    options = parser.parse_args()
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    chosen = [each for each in read() if re.search(options.only, f"{each.file} {each.name}")]
    folder = Path(tempfile.mkdtemp(prefix="cocodiff-mutants-")).resolve()
    try:
        for mutant, result in run([each for each in chosen if each.name not in known], folder, options.guard):
            known[mutant.name] = result
            print(f"{result['result']:8} {mutant.file} {mutant.name} {result['by'] or mutant.seen}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(known, indent=1) + "\n")
    finally:  # a TemporaryDirectory would be removed by each fork
        shutil.rmtree(folder, ignore_errors=True)
    text, suffices = summarize({each.name: known[each.name] for each in chosen})
    print(text)
    return 0 if suffices else 1


if __name__ == "__main__":
    sys.exit(main())
