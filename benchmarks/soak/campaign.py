"""A campaign: random requests in one process group, some struck by faults, each compared with a fresh process."""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak.faults import ERRORS, KILLED, Fault
from benchmarks.soak.job import HANGS, Job, Outcome, Settings
from benchmarks.soak.request import Request, draw
from xfuser_cocodiff.engine.topology.link_profile import AxisLink, Profile
from xfuser_cocodiff.engine.topology.topology import Topology


@dataclass(frozen=True)
class Plan:
    """What a campaign runs. Each request depends on the seed and its number only."""

    seed: int
    ranks: int
    requests: int
    faults: Sequence[str] = ()
    """Kinds of faults, which take turns."""
    fault_every: int = 10
    """Every so many requests one is struck, and run once more without the fault."""
    distinct: int = 40
    """Number of distinct requests."""
    first: int = 0
    """Number of the first request."""
    timeout: float = 120.0
    """Seconds of a request, at most."""
    seconds: float | None = None
    """Time after which no further request begins."""
    model: str | None = None
    """Model of all requests; drawn when not given."""
    mode: str | None = None
    """Mode of all requests; drawn when not given."""

    def request(self, number: int) -> Request:
        """Return a request, the same for all that repeat it."""
        which = random.Random(f"{self.seed} {number}").randrange(self.distinct)
        return draw(random.Random(f"{self.seed} request {which}"), self.model, self.mode)

    def fault(self, number: int) -> Fault | None:
        """Return the fault that strikes a request; None for most."""
        turn, last = divmod(number + 1, self.fault_every)
        if last or not self.faults:
            return None
        generator = random.Random(f"{self.seed} fault {number}")
        kind = self.faults[(turn - 1) % len(self.faults)]
        return Fault(kind, generator.randrange(self.ranks), generator.randrange(self.request(number).steps - 1))


@dataclass
class Campaign:
    """Runs requests, and records which failed, had other bits or hung.

    Args:
        plan: what to run.
        folder: for the link profile and tuning caches.
        report: called with a line on each request.
    """

    plan: Plan
    folder: Path
    report: Callable[[str], object]
    requests: int = 0
    """Requests that had the bits of a fresh process."""
    faults: dict[str, int] = field(default_factory=dict)
    """Faults that had the expected consequence, by kind."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    samples: list[list[dict[str, int]]] = field(default_factory=list)
    """What the ranks of the first job held after each of its requests."""

    def __post_init__(self) -> None:
        self._settings = Settings(
            self.plan.ranks,
            cache=str(self.folder / "cache"),
            profile=write_profile(self.folder, self.plan.ranks),
            collective_seconds=self.plan.timeout / 4,
        )
        self._fresh: dict[Request, list[str | None]] = {}
        self._job: Job | None = None
        self._num_jobs = 0

    def run(self) -> None:
        """Run all requests, until they or the time end."""
        started = time.monotonic()
        try:
            for number in range(self.plan.first, self.plan.first + self.plan.requests):
                if self.plan.seconds and time.monotonic() - started > self.plan.seconds:
                    break
                self._run(number)
        finally:
            self._end_job()

    def _run(self, number: int) -> None:
        request, fault = self.plan.request(number), self.plan.fault(number)
        if fault:
            self._strike(number, request, fault)
        if self._check(number, request, self._in_job(request)):
            self.requests += 1
        struck = f" after {fault.kind}" if fault else ""
        self.report(f"request {number}{struck}: {request.model} {request.mode}; {len(self.failures)} failures so far")

    def _strike(self, number: int, request: Request, fault: Fault) -> None:
        if fault.kind == KILLED:
            self._in_job(request)  # so that all have started
        outcomes = self._in_job(request, fault)
        words = ERRORS[fault.kind].format(victim=fault.victim)
        wrong = [
            f"rank {rank}: {outcome.error}"
            for rank, outcome in enumerate(outcomes)
            if words not in str(outcome.error) and not (fault.kind == KILLED and rank == fault.victim)
        ]
        passed = not wrong or self._fail(number, request, f"{fault.kind}: not {words!r} but {wrong[0]}")
        self.faults[fault.kind] = self.faults.get(fault.kind, 0) + passed

    def _in_job(self, request: Request, fault: Fault | None = None) -> list[Outcome]:
        """Run a request in the job that goes on, and end it if a rank hangs or has ended."""
        if self._job is None:
            self._job, self._num_jobs = Job(self._settings, self.plan.timeout), self._num_jobs + 1
        outcomes = self._job.run(request, fault)
        resources = [each.resources for each in outcomes if each.resources]
        if len(resources) < len(outcomes):
            self._end_job()
        elif self._num_jobs == 1:
            self.samples.append(resources)
        return outcomes

    def _end_job(self) -> None:
        if self._job is not None:
            self._job.end()
            self._job = None

    def _digests(self, request: Request) -> list[str | None]:
        """Return the digests of a request in a fresh process; in exact mode, those of stock xDiT."""
        if request not in self._fresh:
            job = Job(
                self._settings if request.is_lossy else Settings(self.plan.ranks, is_stock=True), self.plan.timeout
            )
            try:
                outcomes = job.run(request)
            finally:
                job.end()
            self._fresh[request] = [each.digest or each.error for each in outcomes]
        return self._fresh[request]

    def _check(self, number: int, request: Request, outcomes: list[Outcome]) -> bool:
        """Return whether a request has returned on all ranks with the bits of a fresh one; record a failure if not."""
        expected = self._digests(request)
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None:
                return self._fail(number, request, f"rank {rank}: {outcome.error}")
            if outcome.digest != expected[rank]:
                return self._fail(number, request, f"rank {rank}: other bits than a fresh process, {expected}")
        return True

    def _fail(self, number: int, request: Request, cause: str) -> bool:
        """Record a failure and return False."""
        self.failures.append({"number": number, "request": json.dumps(asdict(request)), "cause": cause.strip()[-3000:]})
        self.report(f"request {number} FAILED: {cause[:500]}")
        return False

    def record(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {
            **asdict(self.plan),
            "equal_requests": self.requests,
            "fresh_processes": len(self._fresh),
            "faults": self.faults,
            "hangs": sum(HANGS in each["cause"] for each in self.failures),
            "failures": self.failures,
            "samples": self.samples,
        }


def write_profile(folder: Path, ranks: int) -> str:
    """Write a link profile with slow links between nodes, so that all jobs choose the same plans; return its file."""
    topology = Topology.parse(f"node=2,gpu={ranks // 2}", ranks)
    links = tuple(AxisLink(axis.name, 1e-4, 1e8 if axis.name == "node" else 1e9) for axis in topology.axes)
    profile = Profile(topology, links, launch_seconds=1e-4, copy_bytes_per_second=1e9, codec_bytes_per_second=1e9)
    file = folder / "profile.json"
    file.write_text(json.dumps({"profile": profile.to_json()}))
    return str(file)
