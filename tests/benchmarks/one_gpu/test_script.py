"""The script keeps what is known, whatever a fact does, and uses one GPU and no other Python."""

import json
import subprocess
from pathlib import Path

from benchmarks.one_gpu.__main__ import FACTS

ROOT = Path(__file__).parents[3]
PYTHON = """#!/usr/bin/env bash
echo "$@" "$CUDA_VISIBLE_DEVICES" "${PYTHONPATH%%:*}" "$COCODIFF_SHARE_DEVICE" >> calls
case "$*" in
    *kernel_times) exit 9 ;;
    *layers) sleep 321 ;;
esac
"""
TIMEOUT = '#!/usr/bin/env bash\nexec /usr/bin/timeout 1 "${@:4}"\n'
"""Stand-in that grants a second."""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run the script with stand-ins of python3, which notes its arguments, and timeout."""
    for name, text in (("python3", PYTHON.replace(">> calls", f">> {folder}/calls")), ("timeout", TIMEOUT)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "3,4"}
    command = [ROOT / "scripts/one_gpu.sh", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_fact_that_fails_or_hangs_does_not_stop_the_others(tmp_path: Path) -> None:
    assert run(tmp_path, "results", "2").returncode == 1
    rows = map(json.loads, (tmp_path / "results/facts.jsonl").read_text().splitlines())
    assert {row["fact"]: row["exit_status"] for row in rows} == {"kernel_times": 9, "layers": 124, "two_ranks": 0}
    called = [line for line in (tmp_path / "calls").read_text().splitlines() if "-c " not in line]
    start = "-m torch.distributed.run --standalone --nproc-per-node"
    of_each = [f"{start} {ranks} -m benchmarks.one_gpu {tmp_path}/results" for ranks in (1, 1, 2)]
    facts = [f"kernel_times 3 {ROOT} ", f"layers 3 {ROOT} ", f"two_ranks 3 {ROOT} 1"]  # which share the GPU
    assert called == [f"{each} {fact}" for each, fact in zip(of_each, facts, strict=True)]


def test_three_parts_have_all_facts(tmp_path: Path) -> None:
    for part in "123":
        run(tmp_path, "results", part, "--dry-run")
    rows = [json.loads(line) for line in (tmp_path / "results/facts.jsonl").read_text().splitlines()]
    assert sorted(row["fact"] for row in rows) == sorted(FACTS)
    assert "tests.benchmarks.one_gpu.dry_run" in (tmp_path / "calls").read_text()
