"""Compares requests with fresh processes, and records what failed, hung or was left behind."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak.job import HANGS, Job
from benchmarks.soak.rank_worker import Outcome, Settings
from benchmarks.soak.request import Request
from xfuser_cocodiff.engine.topology.link_profile import AxisLink, Profile
from xfuser_cocodiff.engine.topology.topology import Topology

Report = Callable[[str], object]


@dataclass(frozen=True)
class Plan:
    """What a campaign runs."""

    seed: int
    ranks: int
    requests: int
    """Number of requests, without those of faults."""
    faults: int
    kinds: Sequence[str]
    """Kinds of faults, which take turns."""
    distinct: int
    """Number of distinct requests."""
    seconds: float | None
    """Longest time of the campaign; None is no limit."""
    timeout: float
    """Longest time of one request: a rank that takes longer hangs."""
    fixed: tuple[str, ...] = ()
    """Arguments of xDiT that are not drawn."""
    only: tuple[str, int] | None = None
    """The one item to run: its kind and number."""


@dataclass
class Record:
    """What a campaign has found so far."""

    requests: int = 0
    """Requests that were compared."""
    fresh: int = 0
    """Fresh processes that they were compared with."""
    by_mode: dict[str, int] = field(default_factory=dict)
    faults: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By kind: runs, runs that went as they had to, longest time from the fault to the error of a survivor."""
    failures: list[dict[str, str]] = field(default_factory=list)
    hangs: int = 0
    left_behind: list[str] = field(default_factory=list)
    samples: list[list[dict[str, int]]] = field(default_factory=list)
    """Resources of each rank of the first job after each of its requests."""


class Comparison:
    """Compares the requests of a campaign with fresh processes.

    Args:
        plan: of the campaign.
        folder: for the link profile and tuning caches.
        report: called with a line on each failure.
    """

    def __init__(self, plan: Plan, folder: Path, report: Report) -> None:
        self.plan, self.folder, self.report = plan, folder, report
        self.record = Record(samples=[[] for _ in range(plan.ranks)])
        self.settings = Settings(
            plan.ranks,
            cache=str(folder / "cache"),
            profile=write_profile(folder, plan.ranks),
            collective_seconds=plan.timeout / 4,
        )
        self._fresh: dict[Request, list[str | None]] = {}

    def fresh(self, request: Request) -> list[str | None]:
        """Return the digests of a request in a fresh process; in exact mode, those of stock xDiT."""
        if request not in self._fresh:
            settings = self.settings if request.is_lossy else Settings(self.plan.ranks, is_stock=True)
            with self.job(settings, "a fresh process") as job:
                outcomes = job.run(request)
            self.record.fresh += 1
            if broken := [f"{each.error}: {each.message}" for each in outcomes if not each.has_returned]:
                self.fail("a fresh process", request, broken[0])
            self._fresh[request] = [each.digest for each in outcomes]
        return self._fresh[request]

    @contextmanager
    def job(self, settings: Settings, name: str) -> Iterator[Job]:
        """Return a context with a job, whose ranks may leave nothing behind."""
        job = Job(settings, self.plan.timeout, self.folder)
        try:
            yield job
        finally:
            self.record.left_behind += [f"{name}: {each}" for each in job.end()]

    def check(self, name: str, request: Request, outcomes: list[Outcome], expected: list[str | None]) -> bool:
        """Return whether a request has returned on all ranks with the expected bits; record a failure if not."""
        self.record.hangs += any(each.error == HANGS for each in outcomes)
        for rank, (outcome, digest) in enumerate(zip(outcomes, expected, strict=True)):
            if not outcome.has_returned:
                return self.fail(name, request, f"rank {rank}: {outcome.error}: {outcome.message}")
            if outcome.digest != digest:
                return self.fail(name, request, f"rank {rank}: other bits than a fresh process")
        return True

    def fail(self, name: str, request: Request, cause: str) -> bool:
        """Record a failure and return False."""
        self.record.failures.append({"item": name, "request": json.dumps(request.to_json()), "cause": cause[-3000:]})
        self.report(f"{name} FAILED: {cause[:500]}")
        return False


def write_profile(folder: Path, ranks: int) -> str:
    """Write a link profile with slow links between nodes, so that all jobs choose the same plans; return its file."""
    topology = Topology.parse(f"node=2,gpu={ranks // 2}" if ranks % 2 == 0 else f"gpu={ranks}", ranks)
    speeds = {"node": 1e8}
    links = tuple(AxisLink(axis.name, 1e-4, speeds.get(axis.name, 1e9)) for axis in topology.axes)
    profile = Profile(topology, links, launch_seconds=1e-4, copy_bytes_per_second=1e9, codec_bytes_per_second=1e9)
    file = folder / "profile.json"
    file.write_text(json.dumps({"profile": profile.to_json()}))
    return str(file)
