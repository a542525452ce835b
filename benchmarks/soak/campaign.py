"""A campaign: random requests in one process group, some struck by faults, each compared with a fresh process."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak.faults import ERRORS, KILLED, Fault
from benchmarks.soak.job import HANGS, Job, Settings
from benchmarks.soak.request import Outcome, Request, draw

FAULT_EVERY = 10
"""Every so many requests one is struck, and run once more without the fault."""
DISTINCT = 40
"""Number of distinct requests."""
TIMEOUT_SECONDS = 120.0
"""Longest time of a request; collectives have a quarter."""


@dataclass(frozen=True)
class Plan:
    """What a campaign runs. Each request depends on the seed and its number only."""

    seed: int
    ranks: int
    requests: int
    first: int = 0
    """Number of the first request."""
    seconds: float | None = None
    """Time after which no further request begins."""

    def request(self, number: int) -> Request:
        """Return a request, the same for all that repeat it."""
        which = random.Random(f"{self.seed} {number}").randrange(DISTINCT)
        return draw(random.Random(f"{self.seed} request {which}"))

    def fault(self, number: int) -> Fault | None:
        """Return the fault that strikes a request; None for most. Kinds alternate."""
        turn, last = divmod(number + 1, FAULT_EVERY)
        if last:
            return None
        generator, kinds = random.Random(f"{self.seed} fault {number}"), [*ERRORS]
        kind = kinds[(turn - 1) % len(kinds)]
        return Fault(kind, generator.randrange(self.ranks), generator.randrange(self.request(number).steps - 1))


@dataclass
class Campaign:
    """Runs requests, and records which failed, had other bits or hung.

    Args:
        plan: what to run.
        folder: for tuning caches.
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
        # Slow axes are given, so that all jobs make the same choices.
        options = ("--cocodiff_slow_axes", "node", "--cocodiff_timeout", str(TIMEOUT_SECONDS / 4))
        self._settings = Settings(self.plan.ranks, ("--cocodiff_cache", str(self.folder / "cache"), *options))
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
            self._job, self._num_jobs = Job(self._settings, TIMEOUT_SECONDS), self._num_jobs + 1
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
            settings = self._settings if request.is_lossy else Settings(self.plan.ranks, is_stock=True)
            job = Job(settings, TIMEOUT_SECONDS)
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
