"""Every fact of the three stages with toy sizes, on CPU ranks."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests import ranks
from tests.engine.kernels.case import HAS_GPU
from tests.gpu_ranks import GpuRanks
from tests.quick import slow_but
from xfuser_cocodiff.lab.one_gpu import fact_process, runner
from xfuser_cocodiff.lab.one_gpu.fact import Fact, Result, Setting
from xfuser_cocodiff.lab.one_gpu.stages import STAGES

NEEDS_DEVICE = {"ceilings", "profile", "warps", "nccl", "host_waits"}
PYTEST_OUTPUT = "...s\n3 passed, 1 skipped in 0.10s\n"


def on_rank(rank: int, case: str, arguments: dict) -> Result:
    from xfuser_cocodiff.lab.one_gpu.rank_cases import CASES

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # not used: the ranks have a store already
    return CASES[case](True, **arguments)


CASES = {
    "transport": {},
    "all_to_alls": {},
    "flux": {},
    "overlap": {"has_priority": True},
    "host_waits": {},
    "host_bound": {},
    "compiled": {"mode": None},
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_cases_run_on_ranks_that_share_the_gpu(case: str, gpu_ranks: GpuRanks) -> None:
    count = 4 if case in ("all_to_alls", "flux") else 2
    result = gpu_ranks.run(on_rank, count, case, CASES[case])[0]
    assert result["backend"] == gpu_ranks.backend
    assert not result.get("host_waits"), result


def launch_ranks(case: str, count: int, **arguments: object) -> Result:
    return ranks.run(on_rank, count, case, arguments)[0]


def run_command(command: Sequence[str], seconds: float) -> str:
    assert "pytest" in command
    return PYTEST_OUTPUT


def dry_run(stage: str, folder: Path) -> dict[str, Result]:
    """Run a stage and return its lines by fact."""
    setting = Setting(folder, torch.device("cpu"), True, launch_ranks, run_command)

    def measure(fact: Fact, seconds: float) -> Result:
        return fact_process.outcome_of(fact, setting)

    assert runner.run_stage(stage, STAGES[stage], folder, measure) == []
    lines = [json.loads(line) for line in (folder / runner.FACTS_FILE).read_text().splitlines()]
    assert [line["fact"] for line in lines] == [fact.name for fact in STAGES[stage]]
    return {line["fact"]: line for line in lines}


@pytest.mark.skipif(HAS_GPU, reason="on a GPU, scripts/one_gpu.sh runs the facts themselves")
@pytest.mark.parametrize("stage", slow_but(["A"], STAGES))
def test_every_fact_runs_with_toy_sizes(stage: str, tmp_path: Path) -> None:
    lines = dry_run(stage, tmp_path)
    for name, line in lines.items():
        assert line["status"] == (runner.NOT_AVAILABLE if name in NEEDS_DEVICE else runner.OK), line
        assert line["reason"].endswith("needs a GPU") if name in NEEDS_DEVICE else line["result"]
    if stage == "A":
        assert lines["kernel_tests"]["result"] == {"passed": 3, "skipped": 1}
        rows = lines["kernel_times"]["result"]["rows"]
        assert {(row["kernel"], row["bits"]) for row in rows} >= {("encode", 1.6), ("decode", 2)}
    if stage == "B":
        rows = lines["flux"]["result"]["rows"]
        assert [row["bit_equal"] for name, row in rows.items() if name.startswith("exact")] == [True, True]
        assert 0 < rows["balanced@slow_axes=node"]["relative_error"] < 0.2
        algorithms = {row["algorithm"] for row in lines["all_to_alls"]["result"]["rows"]}
        assert algorithms >= {"stock", "flat", "hierarchical:gpu,node", "auto"}
    if stage == "C":
        compiled = lines["compiled"]["result"]["None"]["rows"]
        assert all(row["bit_equal"] for row in compiled.values())
        assert 0 < lines["host_bound"]["result"]["rows"]["stock"]["host_share"] <= 1
