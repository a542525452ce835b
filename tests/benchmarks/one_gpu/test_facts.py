"""Every fact runs without a GPU, on what stands for one.

With another Triton: PYTHONPATH=FOLDER_OF_TRITON pytest --all tests/benchmarks/one_gpu tests/engine/codec. The
interpreter of Triton 3.6 needs NumPy 2.3 or earlier.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.one_gpu.__main__ import FACTS, measure
from benchmarks.one_gpu.setting import Row
from tests import ranks
from tests.quick import slow_but

ROOT = Path(__file__).parents[3]
RANKS = dict.fromkeys(("two_ranks", "flux", "compiled_two_ranks"), 2)
LOSSLESS = "flat", "v-first"


def on_rank(rank: int, name: str, folder: str) -> None:
    from tests.benchmarks.one_gpu import dry_run

    os.environ.update(
        MASTER_ADDR="localhost", MASTER_PORT="0", WORLD_SIZE=str(RANKS.get(name, 1))
    )  # the ranks have a store
    with dry_run.without_gpu(name, Path(folder)) as setting:
        measure(name, setting)


def rows_in(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "facts.jsonl").read_text().splitlines()]


def check_versions(rows: list[Row]) -> None:
    [row] = rows
    assert row["env"]["host"]["torch"] and row["env"]["plugin"] == "installed" and row["env_status"] == 0


def check_nccl(rows: list[Row]) -> None:
    assert [row["part"] for row in rows] == ["group", "all-to-all", "all-gather", "deadline", "aborted group"]
    assert rows[0]["is_of_its_own"] and rows[0]["timeout_seconds"] == 120
    assert rows[1]["is_equal"] and rows[2]["is_equal"]


def check_self_check(rows: list[Row]) -> None:
    assert [row["failure"] for row in rows] == [None]


def check_sanitize(rows: list[Row]) -> None:
    [[summary]] = [row["summary"] for row in rows]
    assert "SUMMARY: 0 " in summary


def check_profile(rows: list[Row]) -> None:
    [row] = rows
    assert (row["Kernel Name"], row["Metric Value"]) == ("encode_kernel", "64")


def check_kernel_times(rows: list[Row]) -> None:
    assert {(row["kernel"], row["bits"]) for row in rows} == {
        (name, bits) for name in ("encode", "decode") for bits in (2, 1.6)
    }
    assert all(row["buffers"] > 1 and row["device_seconds"] > 0 and row["host_seconds"] > 0 for row in rows)


def check_layers(rows: list[Row]) -> None:
    *modes, trace = rows
    assert [row["mode"] for row in modes] == ["stock", "exact", "fast", "balanced"]
    assert all(row["host_waits"] == [] for row in modes)
    assert trace["trace"] == "layer.trace.json.gz"


def check_steps(rows: list[Row]) -> None:
    steps = 8 if rows[0]["fact"] == "flux" else 4
    changes = [row["change"] for row in rows if row["mode"] == "stock"]
    assert changes[0] is None and len(changes) == steps and min(changes[1:]) > 0
    lossless = [row["is_equal"] for row in rows if row["mode"] in LOSSLESS]
    assert lossless == [True] * (steps if rows[0]["fact"] == "flux" else 2 * steps)
    coded = [row for row in rows if "error_by_layer" in row]
    assert [row["is_keyframe"] for row in coded] == [True] + [False] * (steps - 1)
    assert all(0 < row["error"] < 0.01 and row["error_by_layer"] for row in coded)
    assert coded[-1]["sent_bytes"] < coded[-1]["exact_bytes"] / 4


def check_compiled(rows: list[Row]) -> None:
    assert [row["mode"] for row in rows] == ["stock", LOSSLESS[1]]
    assert all(row["is_equal"] and row["stats"]["unique_graphs"] and not row["graph_break"] for row in rows)


CHECKS = {
    "versions": check_versions,
    "nccl": check_nccl,
    "self_check_balanced": check_self_check,
    "self_check_fast": check_self_check,
    "memcheck": check_sanitize,
    "racecheck": check_sanitize,
    "kernel_times": check_kernel_times,
    "layers": check_layers,
    "two_ranks": check_steps,
    "flux": check_steps,
    "profile": check_profile,
    "compiled": check_compiled,
    "compiled_two_ranks": check_compiled,
}
SLOW = {"self_check_balanced", "racecheck", "compiled_two_ranks"}  # as others, with other arguments


@pytest.mark.parametrize("name", slow_but(FACTS.keys() - SLOW, FACTS))
def test_a_fact_runs_without_a_gpu(name: str, tmp_path: Path) -> None:
    ranks.run(on_rank, RANKS.get(name, 1), name, str(tmp_path))
    rows = rows_in(tmp_path)
    assert {row["fact"] for row in rows} == {name}
    CHECKS[name](rows)


@pytest.mark.slow  # the facts themselves are tested above, and the script with stand-ins in test_script.py
def test_the_script_runs_a_part(tmp_path: Path) -> None:
    done = subprocess.run([ROOT / "scripts/one_gpu.sh", tmp_path, "2", "--dry-run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = {row["fact"]: row["exit_status"] for row in rows_in(tmp_path) if "exit_status" in row}
    assert ended == {"kernel_times": 0, "layers": 0, "two_ranks": 0}
