"""The same command twice: the same bits and decisions with a warm cache, or with a link profile from the first run."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.soak import campaign, job
from benchmarks.soak.job import Job, Outcome, Settings
from benchmarks.soak.request import Request
from tests import ranks

pytestmark = pytest.mark.slow  # test_tuning_cache has the quick ones
AUTO = Request("FLUX.1-dev", "balanced", "auto", "auto", 128, 64, 4, 3.5, ("a cat",), seed=3)
"""A request whose plan and overlap schedule are chosen by measurements."""

WARM_UP_STEPS = 30
"""Steps in which all schedules are chosen."""


def in_process(work: Callable, arguments: tuple, file: Path) -> None:
    job.prepare(Path(os.environ["HF_HOME"]))
    file.write_text(json.dumps(work(*arguments)))
    os._exit(0)


def run(folder: Path, work: Callable, *arguments: object) -> list:
    """Call a function in a single-threaded process, from which ranks can be forked."""
    process = ranks.context.Process(target=in_process, args=(work, arguments, folder / "result.json"))
    process.start()
    process.join()
    assert process.exitcode == 0
    return json.loads((folder / "result.json").read_text())


def outcomes_of(request: Request, settings: Settings) -> list[dict]:
    """Run a request in a job of its own and return digest and decisions of each rank."""
    started = Job(settings, 120)
    try:
        outcomes: list[Outcome] = started.run(request)
    finally:
        started.end()
    assert all(each.error is None for each in outcomes), outcomes
    return [{name: asdict(each)[name] for name in ("digest", "decisions")} for each in outcomes]


def with_a_cache(request: Request, folder: str) -> list[list[dict]]:
    settings = Settings(2, cache=str(Path(folder, "cache")))
    outcomes_of(replace(request, steps=WARM_UP_STEPS), settings)
    return [outcomes_of(request, settings) for _ in range(2)]


def with_a_profile(request: Request, folder: str) -> list[list[dict]]:
    settings = Settings(2, profile=campaign.write_profile(Path(folder), 2))
    return [outcomes_of(request, settings) for _ in range(2)]


@pytest.mark.parametrize("mode", ["balanced", "fast", "paper", "exact"])
def test_a_warm_cache_makes_runs_reproducible(hub: Path, tmp_path: Path, mode: str) -> None:
    first, second = run(tmp_path, with_a_cache, replace(AUTO, mode=mode), str(tmp_path))
    assert first == second
    assert first[0]["digest"] and first[0]["decisions"] == first[1]["decisions"]
    assert bool(first[0]["decisions"]["sent_bytes"]) == (mode != "exact")


@pytest.mark.parametrize("mode", ["balanced", "fast", "paper", "exact"])
def test_a_profile_makes_the_first_run_reproducible(hub: Path, tmp_path: Path, mode: str) -> None:
    """Schedules are still chosen by timed steps, but do not change bits or bytes."""
    first, second = run(tmp_path, with_a_profile, replace(AUTO, mode=mode), str(tmp_path))
    for each in (*first, *second):
        del each["decisions"]["schedules"]
    assert first == second
