"""A campaign: random requests in one process group, with faults between them, each compared with a fresh process."""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.soak import resources
from benchmarks.soak.comparison import Comparison, Plan, Record, Report
from benchmarks.soak.fault import Fault, draw
from benchmarks.soak.job import HANGS, Job
from benchmarks.soak.rank_worker import Outcome
from benchmarks.soak.request import Request, choose, palette

WARM_UP = 100
"""Requests before resources are expected to be constant."""
UNRESPONSIVE = "UnresponsiveRankError"
REQUEST, FAULT = "request", "fault"
"""Kinds of items, which `--only` names with their number."""


class Campaign:
    """Runs requests and faults, and compares each request that returns with a fresh process.

    Args:
        plan: what to run.
        folder: for the link profile and tuning caches.
        report: called with a line on each step.
    """

    def __init__(self, plan: Plan, folder: Path, report: Report) -> None:
        self.plan, self.report = plan, report
        self.comparison = Comparison(plan, folder, report)
        self.record = self.comparison.record
        self.palette = palette(plan.seed, plan.distinct, plan.fixed)
        self._deadline = time.monotonic() + plan.seconds if plan.seconds else float("inf")
        self._job: Job | None = None
        self._is_first_job = True

    def run(self) -> Record:
        """Run the campaign and return its record, also if it is interrupted or memory or disk run out."""
        try:
            self._run_items()
        except KeyboardInterrupt:
            self.report("interrupted; the record has what ran so far")
        except OSError as error:  # no memory for a rank, or a full disk
            cause = f"ended by {type(error).__name__}: {error}"
            self.record.failures.append({"item": "the campaign", "request": "", "cause": cause})
        return self.record

    def _run_items(self) -> None:
        try:
            for kind, number in self._items():
                if time.monotonic() > self._deadline:
                    break
                (self._run_fault if kind == FAULT else self._run_request)(number)
        finally:
            self.end_job()

    def _items(self) -> Iterator[tuple[str, int]]:
        """Yield requests with the faults between them, by kind and number."""
        if self.plan.only is not None:
            yield self.plan.only
            return
        requests, faults, fault = self.plan.requests, self.plan.faults, 0
        for number in range(requests):
            yield REQUEST, number
            while fault * requests < (number + 1) * faults:
                yield FAULT, fault
                fault += 1
        yield from ((FAULT, number) for number in range(fault, faults))

    def fault(self, number: int) -> tuple[Request, Fault]:
        """Return a fault and the request that it strikes."""
        request = choose(self.plan.seed, f"fault {number}", self.palette)
        fault = draw(self.plan.seed, number, self.plan.kinds, self.plan.ranks, request)
        if fault.of_kind.strikes_layer:
            request = replace(request, compiled=False, step_cache=False)
        return request, fault

    def _run_request(self, number: int) -> None:
        request = choose(self.plan.seed, f"request {number}", self.palette)
        name = f"{REQUEST}:{number}"
        expected = self.comparison.fresh(request)
        outcomes = self._in_first_job(request)
        if self.comparison.check(name, request, outcomes, expected):
            self.record.requests += 1
            self.record.by_mode[request.mode] = self.record.by_mode.get(request.mode, 0) + 1
        self.report(f"{name} {request.model} {request.mode}: {len(self.record.failures)} failures so far")

    def _in_first_job(self, request: Request, fault: Fault | None = None) -> list[Outcome]:
        """Run a request in the job that goes on, and start another one if it has ended."""
        if self._job is None:
            self._job = Job(self.comparison.settings, self.plan.timeout, self.comparison.folder)
        outcomes = self._job.run(request, fault)
        if self._is_first_job:
            for samples, outcome in zip(self.record.samples, outcomes, strict=True):
                samples += [outcome.resources] if outcome.resources else []
        if any(each.resources is None or each.error == UNRESPONSIVE for each in outcomes):
            self.end_job()
        return outcomes

    def end_job(self) -> None:
        """End the job that goes on, if there is one."""
        if self._job is not None:
            self.record.left_behind += [f"the job of all requests: {each}" for each in self._job.end()]
            self._job, self._is_first_job = None, False

    def _run_fault(self, number: int) -> None:
        request, fault = self.fault(number)
        name = f"{FAULT}:{number} {fault.kind}"
        of_kind = self.record.faults.setdefault(fault.kind, {"runs": 0, "as_expected": 0, "longest_seconds": 0.0})
        num_failures = len(self.record.failures)
        strike = self._strike_run if fault.of_kind.scope == "run" else self._strike_job
        seconds = strike(name, request, fault)
        of_kind["runs"] += 1
        of_kind["as_expected"] += len(self.record.failures) == num_failures
        of_kind["longest_seconds"] = max(of_kind["longest_seconds"], seconds)
        self.report(f"{name}: {len(self.record.failures)} failures so far")

    def _strike_run(self, name: str, request: Request, fault: Fault) -> float:
        """Strike a request of the job that goes on, and run it once more."""
        kind, expected = fault.of_kind, self.comparison.fresh(request)
        outcomes = self._in_first_job(request, fault)
        if kind.error is None and kind.is_comparable:
            self.comparison.check(name, request, outcomes, expected)
        elif any(each.error != kind.error for each in outcomes):
            found = "; ".join(f"{each.error}: {each.message}" for each in outcomes)
            self.record.hangs += any(each.error == HANGS for each in outcomes)
            self.comparison.fail(name, request, f"expected {kind.error} on every rank, got {found}")
        self.comparison.check(f"{name}, next request", request, self._in_first_job(request), expected)
        return 0.0

    def _strike_job(self, name: str, request: Request, fault: Fault) -> float:
        """Let a fault end a job of its own, and return the longest time until a surviving rank named it."""
        compared = self.comparison
        # TeaCache has collectives of its own: a rank that is lost in one is not named, as with stock xDiT.
        request = replace(request, step_cache=False)
        with compared.job(compared.settings, name) as job:
            compared.check(f"{name}, before it", request, job.run(request), compared.fresh(request))
            outcomes = job.run(request, fault)
            struck = job.fault_time()
        wanted = fault.of_kind.names_victim.format(victim=fault.victim)
        survivors = {rank: each for rank, each in enumerate(outcomes) if rank != fault.victim}
        self.record.hangs += any(each.error == HANGS for each in survivors.values())
        for rank, outcome in survivors.items():
            if outcome.error != UNRESPONSIVE or wanted not in outcome.message:
                cause = f"rank {rank} does not say {wanted!r} but {outcome.error}: {outcome.message}"
                compared.fail(name, request, cause)
        return max((each.at - struck for each in survivors.values() if struck and each.at), default=0.0)


def run(plan: Plan, report: Report) -> dict[str, Any]:
    """Run a campaign and return its record as JSON values.

    This process must be prepared by :func:`warm_up.prepare` and have a single thread.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cocodiff-soak-", ignore_cleanup_errors=True) as folder:
        record = Campaign(plan, Path(folder), report).run()
    return {
        "seed": plan.seed,
        "ranks": plan.ranks,
        "seconds": time.monotonic() - started,
        "requests": record.requests,
        "distinct_requests": plan.distinct,
        "fresh_processes": record.fresh,
        "by_mode": record.by_mode,
        "faults": record.faults,
        "hangs": record.hangs,
        "left_behind": record.left_behind,
        "failures": record.failures,
        "resources": [resources.summary(samples, WARM_UP) for samples in record.samples],
        "samples": record.samples,
    }
