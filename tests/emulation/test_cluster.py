"""The emulated cluster: its arithmetic, its command line, and real namespaces where this machine permits them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulation import cluster, links
from emulation.links import Cluster, Link
from emulation.presets import PRESETS
from tests.emulation.requirement import LAUNCHER, needs_namespaces
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.simulation.machines import MACHINES

DEADLINE = 120
"""Seconds after which a test gives up: a guard against hangs, not a bound on speed."""


def described(shape: str, **rates: float) -> Cluster:
    """Return a cluster without creating it."""
    topology = Topology.flat(int(shape[5:])) if shape.startswith("flat=") else Topology.parse(shape)
    return Cluster(topology, rates)


# Who shares which link.


def test_traffic_to_all_other_nodes_shares_one_link() -> None:
    assert described("3x2", node=2, gpu=1).links(2) == (Link("node", (0, 1, 4, 5)), Link("gpu", (3,)))


@pytest.mark.parametrize("shape", ["flat=4", "2x2"])
def test_a_flat_rate_gives_each_rank_one_port(shape: str) -> None:
    assert described(shape, flat=1).links(2) == (Link("flat", (0, 1, 3)),)


def test_a_name_is_one_machine_in_emulation_and_simulation() -> None:
    assert {*PRESETS} & {*MACHINES} == {"aurora"}


@pytest.mark.parametrize(("outside", "threads"), [({}, "1"), ({"OMP_NUM_THREADS": "3"}, "3")])
def test_environment_of_ranks(outside: dict[str, str], threads: str) -> None:
    built = described("node=2,gpu=3", node=1, gpu=2)
    for rank in range(6):
        found = cluster.environment(built, rank, {"HOME": "/", **outside})
        numbers = {
            "RANK": rank,
            "LOCAL_RANK": rank % 3,
            "GROUP_RANK": rank // 3,
            "WORLD_SIZE": 6,
            "LOCAL_WORLD_SIZE": 3,
        }
        assert {name: int(found[name]) for name in numbers} == numbers
        assert (found["HOME"], found["OMP_NUM_THREADS"]) == ("/", threads)
        assert links.from_environment(found) == built and found["MASTER_ADDR"] == links.address(0)
        assert found["GLOO_SOCKET_IFNAME"] == found["TP_SOCKET_IFNAME"] == links.INTERFACE


# The command line.


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--topology 2x2 --rates node=1,gpu=1", "the command after -- is not valid"),
        ("--topology 2x2 -- true", "one of the arguments --rates --preset is required"),
        ("--preset mars -- true", "argument --preset: invalid choice: 'mars' (choose from "),
        ("--topology 2x2 --rates node=1 -- true", "valid are Mbit/s of node, gpu, or of flat alone"),
        ("--preset aurora --scale 1000 -- true", "valid are 0.1 to 10000"),
        ("--topology rack=2 --preset aurora -- true", "--topology: topology 'rack=2' has the unknown axis"),
        ("--topology 1x1 --preset aurora -- true", "has 1 ranks; a cluster has 2 to 254"),
        ("--preset aurora -- no-such-command", "no-such-command"),
    ],
)
def test_bad_options(argv: str, message: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    with pytest.raises(SystemExit) as ended:
        cluster.main(argv.split())
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("emulated_cluster: error: ") and message in said


def test_missing_permissions_are_reported(capsys, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "unshare").write_text("#!/bin/sh\necho unshare failed: Operation not permitted >&2; exit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    for name in ("ip", "tc"):
        (tmp_path / name).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert cluster.main(["--preset", "aurora", "--", "true"]) == 2
    said = capsys.readouterr().err
    assert "needs root or user namespaces, and neither is permitted here: unshare failed: Operation not" in said


# Real namespaces. Ranks run a few lines of Python.


started: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """Start launchers, and stop those that a failed test left running."""
    yield
    while started:
        launcher = started.pop()
        launcher.terminate()
        launcher.wait(DEADLINE)
        launcher.stdout.close()
        launcher.stderr.close()


def start(options: list[str], program: str, *arguments: object, launcher: list[str] = LAUNCHER) -> subprocess.Popen:
    """Start a launcher with piped output; :func:`finish` waits for it and checks that nothing is left behind."""
    command = [*launcher, *options, "--", sys.executable, "-c", program, *map(str, arguments)]
    started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    return started[-1]


def finish(launcher: subprocess.Popen, status: int = 0) -> tuple[list[str], list[str]]:
    """Wait for a launcher, check its status, and return its lines of stdout and stderr."""
    output, error = launcher.communicate(timeout=DEADLINE)
    assert launcher.returncode == status, error
    return output.splitlines(), error.splitlines()


@pytest.mark.alone
@needs_namespaces
def test_transfer_time_is_bytes_over_rate_and_a_shared_link_is_divided_equally() -> None:
    """16 KiB at 10 Mbit/s take 13 ms, also after a pause and on a warm connection. Four connections to rank 1 together
    get as much as the single one to rank 2."""
    program = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, message, answer = dist.get_rank(), torch.zeros(1 << 14, dtype=torch.uint8), torch.zeros(1)
for _ in range(4 if rank < 2 else 0):
    time.sleep(0.05)
    started = time.perf_counter()
    if rank == 0:
        dist.send(message, 1)
        dist.recv(answer, 1)
        print("alone", time.perf_counter() - started)
    else:
        dist.recv(message, 0)
        dist.send(answer, 0)
groups = [dist.new_group() for _ in range(4)]
long, short = ([torch.zeros(1 << size, dtype=torch.uint8) for _ in groups] for size in (19, 18))
dist.barrier()
started = time.perf_counter()
if rank == 0:
    works = [dist.isend(message, 1, group) for message, group in zip(long, groups)] + [dist.isend(short[0], 2)]
elif rank == 1:
    works = [dist.irecv(message, 0, group) for message, group in zip(long, groups)]
else:
    works = [dist.irecv(short[0], 0)]
for work in works:
    work.wait()
if rank == 2:
    print("shared", time.perf_counter() - started)
dist.barrier()
dist.destroy_process_group()
"""
    output, _ = finish(start(["--topology", "flat=3", "--rates", "flat=10"], program))
    assert min(float(line.split()[1]) for line in output if "alone" in line) > 0.85 * (8 << 14) / 1e7
    [seconds] = (float(line.split()[1]) for line in output if "shared" in line)
    assert 8 * (1 << 18) / 1e6 / seconds == pytest.approx(5, rel=0.15)


@needs_namespaces
@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("sys.exit(7)", 7, "rank 1 failed with exit status 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was killed by SIGKILL"),
    ],
)
def test_a_failing_rank_stops_the_others(end: str, status: int, said: str) -> None:
    """Including ranks that ignore signals; earlier output is kept."""
    program = f"""
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("here", flush=True)
if os.environ["RANK"] == "1":
    time.sleep(1)
    {end}
time.sleep(600)
"""
    output, error = finish(start(["--topology", "flat=3", "--rates", "flat=20"], program), status)
    assert "here" in output
    assert error == [f"emulated_cluster: {said}; the other ranks were stopped"]
