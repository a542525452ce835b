"""The same command twice has the same bits: with a warm cache, or with a link profile from the first run."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak import job
from benchmarks.soak.job import Job, Settings
from benchmarks.soak.request import Request
from tests import ranks
from xfuser_cocodiff.engine.topology.link_profile import AxisLink, Profile
from xfuser_cocodiff.engine.topology.topology import Topology

pytestmark = pytest.mark.slow  # test_tuning_cache has the quick ones
AUTO = Request("FLUX.1-dev", "balanced", "auto", "auto", 128, 64, 4, 3.5, ("a cat",), seed=3)
"""A request whose plan and overlap schedule are chosen by measurements."""
WARM_UP_STEPS = 30
"""Steps in which all schedules are chosen."""


def in_process(work: Callable, folder: Path) -> None:
    job.prepare(Path(os.environ["HF_HOME"]))
    (folder / "result.json").write_text(json.dumps(work(folder)))
    os._exit(0)


def digests(request: Request, settings: Settings) -> list[str | None]:
    """Run a request in a job of its own and return the digest of each rank."""
    started = Job(settings, 120)
    try:
        outcomes = started.run(request)
    finally:
        started.end()
    assert all(each.error is None for each in outcomes), outcomes
    return [each.digest for each in outcomes]


def with_a_cache(folder: Path) -> list[list[str | None]]:
    settings = Settings(2, ("--cocodiff_cache", str(folder / "cache")))
    digests(replace(AUTO, steps=WARM_UP_STEPS), settings)
    return [digests(AUTO, settings) for _ in range(2)]


def with_a_profile(folder: Path) -> list[list[str | None]]:
    """Schedules are still chosen by timed steps, but do not change bits."""
    topology = Topology.named(node=2, gpu=1)
    links = AxisLink("node", 1e-4, 1e8), AxisLink("gpu", 1e-4, 1e9)
    profile = Profile(topology, links, launch_seconds=1e-4, copy_bytes_per_second=1e9, codec_bytes_per_second=1e9)
    file = folder / "profile.json"
    file.write_text(json.dumps({"profile": profile.to_json()}))
    settings = Settings(2, ("--cocodiff_cache", "off", "--cocodiff_profile", str(file)))
    return [digests(AUTO, settings) for _ in range(2)]


@pytest.mark.parametrize("work", [with_a_cache, with_a_profile])
def test_the_same_command_twice_has_the_same_bits(hub: Path, tmp_path: Path, work: Callable) -> None:
    process = ranks.context.Process(target=in_process, args=(work, tmp_path))  # ranks can be forked from it
    process.start()
    process.join()
    assert process.exitcode == 0
    first, second = json.loads((tmp_path / "result.json").read_text())
    assert first == second and any(first)
