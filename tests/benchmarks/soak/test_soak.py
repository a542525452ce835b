"""The soak test: what is drawn, what counts as a failure, and a short campaign on two ranks."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.soak import __main__ as soak
from benchmarks.soak import campaign, comparison, fault, job, report, request, resources, warm_up
from benchmarks.soak.comparison import Comparison, Plan
from benchmarks.soak.job import HANGS
from benchmarks.soak.rank_worker import Outcome
from tests import ranks

FIXED = ("--model", "FLUX.1-dev", "--cocodiff_mode", "balanced")
PLAN = Plan(seed=5, ranks=2, requests=2, faults=0, kinds=(), distinct=2, seconds=None, timeout=60, fixed=FIXED)


def test_an_item_depends_on_the_seed_and_its_number_only() -> None:
    palette = request.palette(3, 20)
    assert palette == request.palette(3, 20) == request.palette(3, 30)[:20] != request.palette(4, 20)
    assert len({*palette}) == 20
    assert {each.mode for each in request.palette(0, 60)} == {*request.MODES}
    assert {each.model for each in request.palette(0, 60)} == {*request.MODELS}
    assert all(each.compiled <= (each.model == "FLUX.1-dev") for each in palette)
    names = [*fault.KINDS]
    drawn = [fault.draw(3, number, names, 4, palette[0]) for number in range(2 * len(names))]
    assert [each.kind for each in drawn] == names * 2
    assert drawn[len(names) + 1] == fault.draw(3, len(names) + 1, names, 4, palette[0])
    assert {each.victim for each in drawn} == {0, 1, 2, 3}


def test_arguments_fix_what_is_drawn() -> None:
    fixed = ("--model", "SD3.5", "--cocodiff_mode=fast", "--num_inference_steps", "7", "--cocodiff_v_first", "off")
    found = [request.draw(random.Random(seed), fixed) for seed in range(20)]
    assert {(each.model, each.mode, each.steps, each.v_first) for each in found} == {("SD3.5", "fast", 7, "off")}


def test_faults_in_a_layer_strike_requests_whose_layers_all_run(tmp_path: Path) -> None:
    """A compiled transformer runs no hooks that are added later, and a step cache skips layers."""
    plan = replace(PLAN, kinds=tuple(fault.KINDS), faults=1000, distinct=40, fixed=("--model", "FLUX.1-dev"))
    drawn = campaign.Campaign(plan, tmp_path, lambda text: None)
    struck = [drawn.fault(number) for number in range(plan.faults)]
    in_layers = [each for each, found in struck if found.kind in ("interrupt_in_layer", "out_of_memory")]
    others = [each for each, found in struck if found.kind == "callback_error"]
    assert in_layers and not any(each.compiled or each.step_cache for each in in_layers)
    assert any(each.compiled for each in others) and any(each.step_cache for each in others)


def test_kinds_are_parsed() -> None:
    assert fault.parse_kinds("all") == [*fault.KINDS] and fault.parse_kinds("none") == []
    assert fault.parse_kinds("killed,nan") == ["killed", "nan"]


def test_slope_of_resources() -> None:
    samples = [dict.fromkeys(resources.NAMES, 5) | {"threads": 10 + 3 * number} for number in range(40)]
    found = resources.summary(samples, warm_up=10)
    assert found["threads"]["slope"] == pytest.approx(3) and found["sockets"]["slope"] == 0
    assert (found["threads"]["first"], found["threads"]["most"]) == (43, 127)  # the median of 40, 43 and 46
    before = resources.sample()
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]
    assert resources.sample()["descriptors"] == before["descriptors"] + 5
    for descriptor in held:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("outcomes", "cause"),
    [
        ([Outcome("a"), Outcome("b")], None),
        ([Outcome("a"), Outcome("c")], "rank 1: other bits"),
        ([Outcome("a"), Outcome(None)], "rank 1: other bits"),
        ([Outcome("a"), Outcome(error="ValueError", message="why")], "rank 1: ValueError: why"),
        ([Outcome(error=HANGS), Outcome("b")], "rank 0: hangs"),
    ],
)
def test_what_counts_as_a_failure(tmp_path: Path, outcomes: list[Outcome], cause: str | None) -> None:
    compared = Comparison(PLAN, tmp_path, lambda text: None)
    passed = compared.check("request:0", request.draw(random.Random(0)), outcomes, ["a", "b"])
    assert passed == (cause is None)
    assert [each["cause"].startswith(cause) for each in compared.record.failures] == [True] * (cause is not None)
    assert compared.record.hangs == (outcomes[0].error == HANGS)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--ranks", "3"], "--ranks"),
        (["--requests", "-1"], "-1 is not valid; valid are numbers from 0"),
        (["--timeout", "nan"], "nan is not valid; valid are numbers from 30"),
        (["--faults", "killed,typo"], "--faults typo is not valid; valid are all, none and callback_error"),
        (["--only", "request:1"], "--only needs the --seed of the run to replay"),
        (["--only", "killed", "--seed", "1"], "--only killed is not valid; valid are request:N and fault:N"),
    ],
)
def test_invalid_options(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "set_environment", lambda models: None)  # for new processes only
    try:
        status = soak.main(arguments)
    except SystemExit as ended:  # of argparse
        status = ended.code
    assert status == 2 and error in capsys.readouterr().err


def run_campaign(plan: Plan, file: Path) -> None:
    """Run a campaign in a process of its own, from which its ranks are forked."""
    torch.set_num_threads(1)
    warm_up.prepare()
    file.write_text(json.dumps(campaign.run(plan, print)))
    os._exit(0)


def record_of(plan: Plan, folder: Path) -> dict:
    process = ranks.context.Process(target=run_campaign, args=(plan, folder / "record.json"))
    process.start()
    process.join()
    assert process.exitcode == 0
    return json.loads((folder / "record.json").read_text())


def test_short_campaign(hub: Path, tmp_path: Path) -> None:
    """A request that an error in a layer ends affects no other one, and the campaign leaves nothing behind."""
    plan = replace(PLAN, seed=6)  # whose first request is eager, and has no step cache
    record = record_of(replace(plan, kinds=("interrupt_in_layer",), faults=1, requests=1, distinct=1), tmp_path)
    assert report.succeeded(record), json.dumps({**record, "samples": None}, indent=1)
    assert (record["requests"], record["fresh_processes"]) == (1, 1)
    assert record["faults"]["interrupt_in_layer"]["as_expected"] == 1
    assert [len(samples) for samples in record["samples"]] == [3, 3]  # with the struck request and the next


@pytest.mark.slow  # a short campaign is the quick one
@pytest.mark.parametrize("kinds", [("interrupt_in_layer", "killed"), tuple(fault.KINDS)], ids=["two", "all"])
def test_requests_and_faults(hub: Path, tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """Requests equal fresh ones, also after faults, which survivors name and which leave nothing behind."""
    record = record_of(replace(PLAN, kinds=kinds, faults=len(kinds), timeout=60 if len(kinds) < 9 else 120), tmp_path)
    assert report.succeeded(record), json.dumps({**record, "samples": None}, indent=1)
    assert record["requests"] == 2 and record["by_mode"] == {"balanced": 2}
    assert {name: each["as_expected"] for name, each in record["faults"].items()} == dict.fromkeys(kinds, 1)
    assert record["faults"]["killed"]["longest_seconds"] > 0
    assert all(len(samples) >= 2 and samples[-1]["threads"] > 1 for samples in record["samples"])


def test_faults_are_spread_over_the_requests_and_one_item_is_replayed(tmp_path: Path) -> None:
    def items(**changes: object) -> list[tuple[str, int]]:
        return [*campaign.Campaign(replace(PLAN, **changes), tmp_path, print)._items()]

    spread = items(requests=6, faults=3, kinds=("nan",))
    assert [kind for kind, _ in spread] == ["request", "fault", "request"] * 3
    assert sorted(spread) == [
        *(("fault", number) for number in range(3)),
        *(("request", number) for number in range(6)),
    ]
    assert items(requests=0, faults=2, kinds=("nan",)) == [("fault", 0), ("fault", 1)]
    assert items(faults=2, kinds=("nan",), only=("request", 1)) == [("request", 1)]


def test_record_survives_a_machine_that_has_run_out_of_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(comparison, "Job", fails)
    record = campaign.Campaign(PLAN, tmp_path, print).run()
    assert [each["item"] for each in record.failures] == ["the campaign"]
    assert "BlockingIOError: [Errno 11] Resource temporarily unavailable" in record.failures[0]["cause"]


def test_shared_memory_of_other_processes_is_not_left_behind() -> None:
    assert job.names_process("torch_1234_88_0", [77, 1234]) and job.names_process("psm_1234", [1234])
    assert not any(job.names_process(name, [1234, 5]) for name in ("torch_91234_6_0", "psm_12345", "sem.mp"))


def test_termination_is_an_interrupt_and_a_second_one_does_not_disturb_the_end() -> None:
    before = signal.signal(signal.SIGTERM, soak._interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow  # the signal alone is quick
def test_terminated_command_writes_its_record_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (temporary := tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "benchmarks.soak", "--seed", "5", "--json", str(tmp_path / "r.json")]
    process = subprocess.Popen(
        [*command, "--faults", "none", "--", *FIXED],
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    while not process.stderr.readline().startswith("request:0"):
        assert process.poll() is None
    process.terminate()
    process.communicate()
    assert json.loads((tmp_path / "r.json").read_text())["failures"] == []
    assert [*temporary.glob("cocodiff*")] == []
