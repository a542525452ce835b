"""The emulated cluster: its arithmetic without processes, its command line, and, where they can be made, namespaces."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from xfuser_cocodiff.emulation import cluster, links, namespaces
from xfuser_cocodiff.emulation.links import Cluster, Link
from xfuser_cocodiff.emulation.presets import PRESETS
from xfuser_cocodiff.emulation.ranks import run
from xfuser_cocodiff.machine.launcher import CLUSTER_VARIABLE

LAUNCHER = [sys.executable, "-m", "xfuser_cocodiff.emulation.cluster"]
TWO_RANKS = ["--topology", "flat=2", "--rates", "flat=20"]
DEADLINE = 120
"""Seconds after which something that must happen has not: a guard, not a bound on speed."""


def why_not() -> str | None:
    """What keeps this machine from emulating a cluster."""
    tried = subprocess.run([*LAUNCHER, *TWO_RANKS, "--", "true"], capture_output=True, text=True)
    return tried.stderr.strip() or None


reason = why_not()
needs_namespaces = pytest.mark.skipif(reason is not None, reason=reason or "")


def described(shape: str, **rates: float) -> Cluster:
    """A cluster that is not built."""
    topology = cluster._topology(shape)
    return Cluster(topology, rates, tuple(map(namespaces.address, range(topology.size))))


# Who shares which link.


def test_links_of_three_levels() -> None:
    assert described("2x3x2", node=3, gpu=2, tile=1).links(7) == (
        Link("node", (0, 1, 2, 3, 4, 5)),
        Link("tile", (6,)),
        Link("gpu", (8, 9)),
        Link("gpu", (10, 11)),
    )


def test_all_other_nodes_share_a_link() -> None:
    assert described("3x2", node=2, gpu=1).links(2) == (Link("node", (0, 1, 4, 5)), Link("gpu", (3,)))


def test_links_of_a_node() -> None:
    assert described("node=1,gpu=2,tile=3", gpu=2, tile=1).links(0) == (
        Link("tile", (1,)),
        Link("tile", (2,)),
        Link("gpu", (3, 4, 5)),
    )


@pytest.mark.parametrize("shape", ["flat=4", "2x2"])
def test_a_port_is_shared_by_all(shape: str) -> None:
    assert described(shape, flat=1).links(2) == (Link("flat", (0, 1, 3)),)


@pytest.mark.parametrize(
    ("shape", "rates"), [("2x3x2", {"node": 3.0, "gpu": 2.0, "tile": 1.0}), ("flat=3", {"flat": 1})]
)
def test_a_cluster_survives_its_variable(shape: str, rates: dict[str, float]) -> None:
    built = described(shape, **rates)
    assert links.from_environment({CLUSTER_VARIABLE: built.to_json()}) == built
    assert links.from_environment({}) is None


def test_outside_of_a_cluster_nothing_is_shaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLUSTER_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match="only a rank of an emulated cluster"):
        links.shape(2)


def test_presets_keep_their_proportions() -> None:
    aurora = PRESETS["aurora"].rates(["node", "gpu", "tile"])
    assert aurora == pytest.approx({"node": 13.33, "gpu": 12, "tile": 148}, abs=0.01)
    for name, preset in PRESETS.items():
        assert cluster._topology(preset.topology).size == 8
        if name != "flat":
            assert set(preset.gigabytes) == {"node", "gpu", "tile"}


def test_packets_are_as_long_as_is_asked() -> None:
    """A millisecond at 12 Mbit/s is 1500 bytes; packets have at most 16 kB."""
    for machine in ("--preset aurora", "--topology node=2,gpu=2,tile=2 --rates tile=148,gpu=12,node=13.3"):
        for asked, sizes in (("1", (1500, 16_000)), ("4", (6000, 16_000)), (None, (1500, 4600))):
            given = f"{machine} --packet_ms {asked} --check" if asked else f"{machine} --check"
            built = cluster._cluster(cluster._options(given.split()))
            assert (built.packet_bytes("gpu"), built.packet_bytes("tile")) == pytest.approx(sizes, rel=0.01)
            assert links.from_environment({CLUSTER_VARIABLE: built.to_json()}) == built


def test_where_ranks_crowd_the_cores_packets_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.os, "sched_getaffinity", lambda _: {0, 1})
    for ranks, packet_bytes, asked in ((16, 1500, ""), (17, 12_000, ""), (17, 1500, "--packet_ms 0.25")):
        given = f"--topology flat={ranks} --rates flat=12 {asked} --check"
        assert cluster._cluster(cluster._options(given.split())).packet_bytes("flat") == packet_bytes


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
        assert links.from_environment(found) == built and found["MASTER_ADDR"] == built.addresses[0]
        assert found["GLOO_SOCKET_IFNAME"] == found["TP_SOCKET_IFNAME"] == built.interface


# The command line.


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--topology 2x2 --rates node=1,gpu=1", "nothing to do: give --check, or a command after --"),
        ("--topology 2x2 --check", "give either --rates or --preset"),
        ("--topology 2x2 --rates node=1,gpu=1 --preset pcie --check", "give either --rates or --preset"),
        ("--rates flat=1 --check", "--rates needs --topology"),
        ("--preset mars --check", "--preset 'mars' is not known; valid are aurora, pcie, ethernet, flat"),
        ("--preset aurora --topology flat=8 --check", "a flat topology goes with --preset flat"),
        ("--topology 2x2 --rates node=1 --check", "valid are Mbit/s of node, gpu, each once, or of flat alone"),
        ("--topology 2x2 --rates node=1,gpu=1,gpu=2 --check", "each once"),
        ("--topology 2x2 --rates node=fast,gpu=1 --check", "--rates node 'fast' is not valid; it is a number above 0"),
        ("--topology 2x2 --rates node=0.01,gpu=1 --check", "node=0.01 Mbit/s is not valid; links have 0.1 to 10000"),
        ("--preset aurora --scale 1000 --check", "links have 0.1 to 10000"),
        ("--preset aurora --scale 0 --check", "--scale '0' is not valid"),
        ("--preset aurora --packet_ms 0 --check", "--packet_ms '0' is not valid; it is a number above 0"),
        ("--topology flat --preset flat --check", "flat=8 does"),
        ("--topology rack=2 --preset aurora --check", "--topology: topology 'rack=2' names the unknown axis"),
        ("--topology 1x1 --preset aurora --check", "has 1 ranks; a cluster has 2 to 254"),
        ("--topology flat=500 --preset flat --check", "has 500 ranks; a cluster has 2 to 254"),
        ("--preset aurora --json x -- true", "--json is for what --check finds"),
        ("--preset aurora --check --json /dev/null/x/y", "--json /dev/null/x/y: "),
        ("--preset aurora --chek -- true", "unrecognized arguments: --chek"),
        ("--preset aurora -- no-such-command", "there is no command 'no-such-command'"),
    ],
)
def test_bad_options(argv: str, message: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "make", lambda _: pytest.fail("something was made"))
    assert cluster.main(argv.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("emulated_cluster: ")
    assert error.count("\n") == 1


def test_without_iproute2(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.shutil, "which", lambda _: None)
    assert cluster.main(["--preset", "aurora", "--check"]) == 2
    assert "needs ip and tc of the package iproute2" in capsys.readouterr().err


def test_the_script_keeps_the_working_folder(tmp_path: Path) -> None:
    """The environment that it sources changes folder; commands run where the caller is."""
    scripts, caller = tmp_path / "checkout" / "scripts", tmp_path / "caller"
    for folder in (scripts, caller, tmp_path / "bin"):
        folder.mkdir(parents=True)
    script = Path(__file__).parent.parent.parent / "scripts" / "emulated_cluster.sh"
    (scripts / script.name).write_text(script.read_text())
    (scripts / "environment.sh").write_text('cd "$(dirname "${BASH_SOURCE[0]}")/.."\n')
    python = tmp_path / "bin" / "python"
    python.write_text('#!/bin/sh\npwd; printf "%s|" "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", scripts / script.name, "--preset", "pcie", "--", "a command", ""],
        cwd=caller,
        env={**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{caller}\n-m|xfuser_cocodiff.emulation.cluster|--preset|pcie|--|a command||"


# Real namespaces. Ranks run a few lines of Python.


started: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """A launcher whose test has failed is stopped."""
    yield
    while started:
        launcher = started.pop()
        launcher.terminate()
        launcher.wait(DEADLINE)
        launcher.stdout.close()
        launcher.stderr.close()


def start(options: list[str], program: str, *arguments: object, launcher: list[str] = LAUNCHER) -> subprocess.Popen:
    """A launcher with its outputs at hand; :func:`finish` waits for it and checks what it left behind."""
    command = [*launcher, *options, "--", sys.executable, "-c", program, *map(str, arguments)]
    started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    return started[-1]


def finish(launcher: subprocess.Popen, status: int = 0) -> tuple[list[str], list[str]]:
    """Lines on stdout and stderr of a launcher that ends with this status."""
    output, error = launcher.communicate(timeout=DEADLINE)
    assert launcher.returncode == status, error
    return output.splitlines(), error.splitlines()


@pytest.mark.alone
@needs_namespaces
@pytest.mark.parametrize(
    "options",
    [
        ["--preset", "aurora", "--scale", "0.3"],
        pytest.param(["--preset", "aurora", "--packet_ms", "8"], marks=pytest.mark.slow),
        pytest.param(["--topology", "node=2,tile=2", "--rates", "tile=50,node=1"], marks=pytest.mark.slow),
        pytest.param(["--topology", "flat=3", "--rates", "flat=10"], marks=pytest.mark.slow),
    ],
    ids=["aurora", "large packets", "two levels", "flat"],
)
def test_links_carry_what_was_asked(options: list[str], tmp_path: Path) -> None:
    file = tmp_path / "folder" / "check.json"
    done = subprocess.run([*LAUNCHER, *options, "--check", "--json", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(file.read_text())
    assert {row["axis"] for row in record["axes"]} == set(record["cluster"]["rates"])
    for row in record["axes"]:
        assert row["asked"] == record["cluster"]["rates"][row["axis"]] * record["cluster"]["scale"]
        assert 0.85 < row["ratio"] < 1.15
        assert re.search(rf"^{row['axis']} +{row['links']} +{row['asked']:.2f} ", done.stdout, re.MULTILINE)


@pytest.mark.alone
@needs_namespaces
def test_a_check_that_fails_is_no_success() -> None:
    program = "from xfuser_cocodiff.emulation import cluster, links; import sys; links.BURST_SECONDS = 3; "
    command = [sys.executable, "-c", f"{program}sys.exit(cluster.main(sys.argv[1:]))", *TWO_RANKS]
    done = subprocess.run([*command, "--check", "--", "echo", "ran"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "links off their rate by more than 15%: flat" in done.stderr
    assert "ran" not in done.stdout


@pytest.mark.alone
@needs_namespaces
def test_a_rank_can_reshape_its_links() -> None:
    program = """
from xfuser_cocodiff.emulation import link_check, links
for scale in (0.25, 1.5):
    built = links.shape(scale)
    assert links.from_environment() == built and built.scale == scale
    link_check.main()
"""
    output, _ = finish(start(["--topology", "2x2", "--rates", "node=8,gpu=20"], program))
    found = {"node": [], "gpu": []}
    for line in output:
        _, axis, rate = line.split()
        found[axis].append(float(rate))
    for axis, asked in (("node", 8), ("gpu", 20)):
        slow, fast = sorted(found[axis])[:4], sorted(found[axis])[4:]
        assert slow == pytest.approx([0.25 * asked] * 4, rel=0.15)
        assert fast == pytest.approx([1.5 * asked] * 4, rel=0.15)


@pytest.mark.alone
@needs_namespaces
def test_a_message_takes_as_long_as_its_bytes() -> None:
    """Nothing is free: 16 KiB at 4 Mbit/s are 33 ms, also after a rest and on a connection that knows its way."""
    program = """
import os, socket, time
from xfuser_cocodiff.emulation import link_check, links
built, size = links.from_environment(), 1 << 14
if os.environ["RANK"] == "0":
    with link_check.connect(built.addresses[1], 7000) as peer:
        for _ in range(4):
            time.sleep(0.05)
            started = time.perf_counter()
            peer.sendall(bytes(size))
            peer.recv(1)
            print(time.perf_counter() - started)
else:
    with socket.create_server((built.addresses[1], 7000)) as server:
        peer = server.accept()[0]
        for _ in range(4):
            peer.recv(size, socket.MSG_WAITALL)
            peer.sendall(b"!")
"""
    output, _ = finish(start(["--topology", "flat=2", "--rates", "flat=4"], program))
    assert min(float(line.split()[1]) for line in output) > 0.85 * (8 << 14) / 4e6


@pytest.mark.alone
@needs_namespaces
def test_ranks_have_equal_shares_of_a_link() -> None:
    """Four connections to rank 1 get together what the one to rank 2 gets."""
    program = """
import contextlib, os, socket, threading, time
from xfuser_cocodiff.emulation import link_check, links
built, rank = links.from_environment(), int(os.environ["RANK"])
if rank == 0:
    def send(peer):
        with link_check.connect(built.addresses[peer], 7000) as connection:
            while True:
                connection.send(bytes(1 << 14))
    for peer in (1, 1, 1, 1):
        threading.Thread(target=send, args=(peer,), daemon=True).start()
    with link_check.connect(built.addresses[1], 7001) as signal:
        signal.recv(1)
    with link_check.connect(built.addresses[2], 7000) as connection:
        connection.sendall(bytes(1 << 18))
        connection.recv(1)
    os._exit(0)
with socket.create_server((built.addresses[rank], 7000), backlog=4) as server:
    def drain(connection):
        with connection, contextlib.suppress(ConnectionError):
            while connection.recv(1 << 16):
                pass
    if rank == 2:
        connection = server.accept()[0]
        connection.recv(1)
        started = time.perf_counter()
        connection.recv((1 << 18) - 1, socket.MSG_WAITALL)
        print("Mbit/s", 8 * (1 << 18) / 1e6 / (time.perf_counter() - started))
        connection.sendall(b"!")
    else:
        threads = [threading.Thread(target=drain, args=(server.accept()[0],)) for _ in range(4)]
        for thread in threads:
            thread.start()
        with socket.create_server((built.addresses[1], 7001)) as starter:
            starter.accept()[0].sendall(b"!")
        for thread in threads:
            thread.join()
"""
    output, _ = finish(start(["--topology", "flat=3", "--rates", "flat=10"], program))
    assert float(output[0].split()[2]) == pytest.approx(5, rel=0.15)


def test_the_end_of_output_is_awaited_where_it_is_written_slowly() -> None:
    found: list[bytes] = []

    def write(rank: int, descriptor: int, line: bytes) -> None:
        time.sleep(0.5)
        found.append(line)

    code = "print(*range(5), sep=chr(10))"
    assert run([([sys.executable, "-c", code], os.environ)], write) is None
    assert found == [b"0", b"1", b"2", b"3", b"4"]
    code = "import subprocess; subprocess.Popen(['sleep', '60']); print('end')"  # which holds the output open
    assert run([([sys.executable, "-c", code], os.environ)], write) is None
    assert found[5:] == [b"end"]


@needs_namespaces
def test_lines_are_whole_and_keep_their_output() -> None:
    program = """
import os, sys
rank = os.environ["RANK"]
for i in range(300):
    for output in (sys.stdout, sys.stderr):
        output.write(rank * 200)
        output.flush()
        output.write("\\n")
sys.stdout.write("no end of line")
"""
    output, error = finish(start(["--topology", "flat=3", "--rates", "flat=20"], program))
    lines = [f"[{rank}] {str(rank) * 200}" for rank in range(3) for _ in range(300)]
    assert sorted(error) == lines
    assert sorted(output) == sorted([*lines, *(f"[{rank}] no end of line" for rank in range(3))])


@needs_namespaces
@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("sys.exit(7)", 7, "rank 1 failed with exit status 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was killed by SIGKILL"),
    ],
)
def test_a_failing_rank_stops_the_others(end: str, status: int, said: str) -> None:
    """Those too that do not listen; what they have said is there."""
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
    assert "[1] here" in output
    assert error == [f"emulated_cluster: {said}; the others were stopped"]


@needs_namespaces
def test_a_reader_that_goes_away_stops_the_ranks() -> None:
    launcher = start(TWO_RANKS, "while True: print('line')")
    launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.wait(DEADLINE) == 128 + signal.SIGPIPE


@needs_namespaces
def test_gloo() -> None:
    program = """
import os, torch, torch.distributed as dist
assert sorted(os.listdir("/sys/class/net")) == ["eth0", "lo"]
dist.init_process_group("gloo")
value = torch.full((10_000,), dist.get_rank() + 1.0)
dist.all_reduce(value)
assert torch.equal(value, torch.full((10_000,), 10.0))
dist.barrier()
dist.destroy_process_group()
print("reduced")
"""
    output, error = finish(start(["--topology", "2x2", "--rates", "node=20,gpu=100"], program))
    said = [line for line in output if "[Gloo]" not in line]  # which PyTorch 2.8 says of its connections
    assert sorted(said) == [f"[{rank}] reduced" for rank in range(4)]
    assert error == []
