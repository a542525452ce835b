"""Faults that need a job of their own: lost ranks, cache folders, links."""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.emulation import forked_ranks, links, namespaces
from xfuser_cocodiff.lab.soak.comparison import Comparison
from xfuser_cocodiff.lab.soak.fault import KINDS, Fault
from xfuser_cocodiff.lab.soak.job import HANGS, Job
from xfuser_cocodiff.lab.soak.rank_worker import Outcome, RankWorker, Settings
from xfuser_cocodiff.lab.soak.request import Request

HUGE_BYTES = 100 * 2**20
UNRESPONSIVE = "UnresponsiveRankError"
LINK_MBITS = 50.0
"""Rate of the links of an emulated cluster."""


def strike_job(comparison: Comparison, name: str, request: Request, fault: Fault) -> float:
    """Let a fault end a job, and return the longest time until a surviving rank named it."""
    # TeaCache has collectives of its own: a rank that is lost in one is not named, as with stock xDiT.
    request = replace(request, step_cache=False)
    with comparison.job(comparison.settings, name) as job:
        comparison.check(f"{name}, before it", request, job.run(request), comparison.fresh(request))
        outcomes = job.run(request, fault)
        struck = job.fault_time()
    wanted = KINDS[fault.kind].names_victim.format(victim=fault.victim)
    survivors = {rank: each for rank, each in enumerate(outcomes) if rank != fault.victim}
    comparison.record.hangs += any(each.error == HANGS for each in survivors.values())
    for rank, outcome in survivors.items():
        if outcome.error != UNRESPONSIVE or wanted not in outcome.message:
            cause = f"rank {rank} does not say {wanted!r} but {outcome.error}: {outcome.message}"
            comparison.fail(name, request, cause)
    times = [each.at - struck for each in survivors.values() if struck and each.at]
    return max(times, default=0.0)


def strike_start(comparison: Comparison, name: str, request: Request, fault: Fault) -> float:
    """Start a job with a cache folder that a fault has struck."""
    # Only what the cache decides: links that are probed, and schedules that are timed, in exact mode.
    request = replace(request, mode="exact", v_first="auto", head_groups=None, schedule=None, compiled=False)
    expected = comparison.fresh(request)
    with tempfile.TemporaryDirectory(dir=comparison.folder) as folder:
        settings = replace(comparison.settings, cache=str(Path(folder, "cache")), profile=None)
        if fault.kind == "cache_shared":
            _share(comparison, name, request, settings)
            return 0.0
        with comparison.job(settings, name) as job:
            comparison.check(f"{name}, before it", request, job.run(request), expected)
        settings = _damage(fault.kind, settings)
        with comparison.job(settings, name) as job:
            comparison.check(name, request, job.run(request), expected)
        if left := [file.name for file in Path(folder).rglob("*") if file.is_file() and file.suffix != ".json"]:
            comparison.record.left_behind.append(f"{name}: {', '.join(left)} in the cache folder")
    return 0.0


def _share(comparison: Comparison, name: str, request: Request, settings: Settings) -> None:
    """Run two jobs at once on one cache folder."""
    with comparison.job(settings, name) as first, comparison.job(settings, name) as second:
        jobs: tuple[Job, Job] = (first, second)
        for job in jobs:
            job.send(request)
        for job in jobs:
            comparison.check(name, request, job.receive(), comparison.fresh(request))


def _damage(kind: str, settings: Settings) -> Settings:
    """Damage the files of a cache folder, and return the settings of a job that uses it."""
    folder = Path(settings.cache)
    if kind == "cache_full":
        for file in folder.glob("*.json"):
            file.unlink()
        return replace(settings, is_disk_full=True)
    if kind == "cache_read_only":
        if os.geteuid():
            folder.chmod(0o500)
            return settings
        return replace(settings, cache="/proc/cocodiff")  # root may write to any other folder
    for file in folder.glob("*.json"):
        content = file.read_text()
        if kind == "cache_corrupt":
            file.write_bytes(bytes(range(256)) * 8)
        elif kind == "cache_truncated":
            file.write_text(content[: len(content) // 2])
        elif kind == "cache_huge":
            file.write_text(content[:-1] + " " * HUGE_BYTES + content[-1:])
        else:
            values = json.loads(content)
            file.write_text(json.dumps({**values, "machine": {**values["machine"], "torch": "another"}}))
    return settings


def strike_links(comparison: Comparison, name: str, request: Request, fault: Fault) -> float:
    """Run a request on an emulated cluster of which a link stalls or loses its rate."""
    topology = Topology.parse(f"node=2,gpu={comparison.plan.ranks // 2}", comparison.plan.ranks)
    addresses = tuple(map(namespaces.address, range(topology.size)))
    cluster = links.Cluster(topology, dict.fromkeys(("node", "gpu"), LINK_MBITS), addresses)
    expected, before = comparison.fresh(request), _namespaces()
    settings, folder = comparison.settings, comparison.folder

    def work(rank: int) -> str | None:
        dist.init_process_group("gloo")
        worker = RankWorker(rank, settings, folder)
        outcome: Outcome = worker.run(request, fault)
        if outcome.error:
            raise RuntimeError(f"{outcome.error}: {outcome.message}")
        return outcome.digest

    try:
        found = forked_ranks.run_forked(
            cluster,
            work,
            results_of=range(topology.size),
            deadline_seconds=comparison.plan.timeout,
            write=lambda *_: None,
        )
    except TimeoutError as error:
        comparison.record.hangs += 1
        comparison.fail(name, request, str(error))
    except RuntimeError as error:
        comparison.fail(name, request, str(error))
    else:
        if [found[rank] for rank in range(topology.size)] != expected:
            comparison.fail(name, request, "other bits than a fresh process")
    comparison.record.left_behind += [f"{name}: network namespace {each}" for each in _namespaces() - before]
    return 0.0


def _namespaces() -> set[str]:
    return {file.name for file in namespaces.FOLDER.iterdir()} if namespaces.FOLDER.exists() else set()


RUN: dict[str, Callable[[Comparison, str, Request, Fault], float]] = {
    "job": strike_job,
    "start": strike_start,
    "links": strike_links,
}
"""By scope of the kind of fault; return the longest time from the fault to the error of a survivor, in seconds."""
