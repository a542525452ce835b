"""The soak test: what is drawn, what counts as a failure, and a short campaign on two ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak import request
from benchmarks.soak.campaign import DISTINCT, Campaign, Plan
from benchmarks.soak.faults import ERRORS
from benchmarks.soak.job import HANGS
from benchmarks.soak.request import Outcome
from tests.quick import slow

PLAN = Plan(seed=3, ranks=4, requests=200)


def test_a_request_depends_on_the_seed_and_its_number_only() -> None:
    drawn = [PLAN.request(number) for number in range(200)]
    assert drawn == [Plan(seed=3, ranks=2, requests=1).request(number) for number in range(200)]
    assert 20 < len({*drawn}) <= DISTINCT
    assert {each.mode for each in drawn} == {*request.MODES} and {each.model for each in drawn} == {*request.MODELS}


def test_every_tenth_request_is_struck_by_the_next_kind() -> None:
    struck = {number: fault for number in range(200) if (fault := PLAN.fault(number))}
    assert [*struck] == [*range(9, 200, 10)]
    assert [fault.kind for fault in struck.values()] == [*ERRORS] * 10
    assert {0, 1, 2} <= {fault.victim for fault in struck.values()} <= {*range(4)}
    assert all(fault.call < PLAN.request(number).steps - 1 for number, fault in struck.items())


@pytest.mark.parametrize(
    ("outcomes", "cause"),
    [
        ([Outcome("a"), Outcome("b")], None),
        ([Outcome("a"), Outcome("c")], "rank 1: other bits"),
        ([Outcome("a"), Outcome(error="ValueError: why")], "rank 1: ValueError: why"),
        ([Outcome(error=HANGS), Outcome("b")], "rank 0: hangs"),
    ],
)
def test_what_counts_as_a_failure(
    tmp_path: Path, outcomes: list[Outcome], cause: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = Campaign(Plan(seed=1, ranks=2, requests=1), tmp_path, print)
    monkeypatch.setattr(campaign, "_in_job", lambda *_: outcomes)
    monkeypatch.setattr(campaign, "_digests", lambda _: ["a", "b"])
    campaign.run()
    record = campaign.record()
    assert [each["cause"].startswith(cause) for each in record["failures"]] == [True] * (cause is not None)
    assert (record["equal_requests"], record["hangs"]) == (cause is None, HANGS in str(cause))


@pytest.mark.parametrize(("number", "fault"), [(9, "interrupted"), slow(19, "killed")])
def test_a_request_after_a_fault_equals_a_fresh_process(tmp_path: Path, number: int, fault: str) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--seed", "2", "--first", str(number), "--requests", "1"]
    done = subprocess.run([*command, "--json", str(tmp_path / "r.json")], capture_output=True, text=True)
    record = json.loads((tmp_path / "r.json").read_text())
    assert done.returncode == 0, (record["failures"], done.stderr)
    assert (record["equal_requests"], record["fresh_processes"]) == (1, 1)
    assert record["faults"] == {fault: 1}
    assert all(len(sample) == 2 and sample[0]["threads"] > 1 for sample in record["samples"])  # by rank
