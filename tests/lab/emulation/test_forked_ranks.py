"""Forked ranks of an emulated cluster. A process of a single thread, which tests are not, starts them."""

import json
import subprocess
import sys
import threading

import pytest

from tests.lab.emulation.requirement import needs_namespaces
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.emulation import forked_ranks, namespaces
from xfuser_cocodiff.lab.emulation.links import Cluster

DEADLINE = 120
"""Seconds after which a test gives up: a guard against hangs, not a bound on speed."""
BEGIN = """
import json, os, socket, sys, threading, time
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.emulation import counters, dilation, forked_ranks, links, namespaces
from xfuser_cocodiff.lab.emulation.forked_ranks import run_forked

def emulated(shape, ports=(), **rates):
    topology = Topology.parse(shape)
    return links.Cluster(topology, rates, tuple(map(namespaces.address, range(topology.size))), ports=ports)

four = emulated("node=2,gpu=2", node=50, gpu=50)
"""


def run(program: str) -> tuple[list, str, list[str]]:
    """Run a program and return the JSON in its last line of output, all before it, and its lines of errors."""
    done = subprocess.run([sys.executable, "-c", BEGIN + program], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    *output, last = done.stdout.splitlines()
    return json.loads(last), "\n".join(output), done.stderr.splitlines()


@needs_namespaces
def test_ranks_have_networks_environments_and_results() -> None:
    found, output, errors = run("""
print("before the fork")
marked = object()
def work(rank):
    interfaces = sorted(line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line)
    print("output of", rank)
    print("error of", rank, file=sys.stderr)
    return marked is not None, rank, interfaces, links.from_environment() == four, os.environ["LOCAL_RANK"], os.getpid()
results = run_forked(four, work, results_of=(0, 3))
print(json.dumps([sorted(results), *results.values(), "RANK" in os.environ]))
""")
    ranks, (*first, number), (*last, other), changed = found
    assert ranks == [0, 3]
    assert first == [True, 0, ["eth0", "lo"], True, "0"]
    assert last == [True, 3, ["eth0", "lo"], True, "1"]
    assert number != other and not changed
    assert sorted(output.splitlines()) == [*(f"[{rank}] output of {rank}" for rank in range(4)), "before the fork"]
    assert sorted(errors) == [f"[{rank}] error of {rank}" for rank in range(4)]


@pytest.mark.slow  # ranks of `cocodiff compare` are in one of these cells (test_emulate)
@needs_namespaces
def test_cells_with_torch_run_one_after_another() -> None:
    found, output, errors = run("""
forked_ranks.prepare_environment()
import torch
import torch.distributed as dist
def work(rank):
    dist.init_process_group("gloo")
    value = torch.full((1000,), rank + 1.0)
    dist.all_reduce(value)
    return dist.get_world_size(), value.unique().tolist(), torch.get_num_threads(), len(links.of_this_rank().links(0))
cells = four, emulated("gpu=3", flat=50), emulated("gpu=2", gpu=50)
print(json.dumps([run_forked(cell, work)[0] for cell in cells]))
""")
    assert found == [[4, [10.0], 1, 2], [3, [6.0], 1, 1], [2, [3.0], 1, 1]]
    assert errors == []
    assert all("[Gloo]" in line for line in output.splitlines())  # which PyTorch 2.8 says of its connections


@needs_namespaces
def test_no_rank_ends_before_all_have_returned() -> None:
    found, _, _ = run("""
opened = []
def work(rank):
    if rank == 0:
        opened.append(socket.create_server((four.addresses[0], 5000)))  # closed when the rank ends
        return None
    time.sleep(0.5)
    with socket.create_connection((four.addresses[0], 5000)):
        return "connected"
print(json.dumps(run_forked(four, work, results_of=(1, 2))))
""")
    assert found == {"1": "connected", "2": "connected"}


@needs_namespaces
def test_a_failing_rank_stops_the_others_and_is_reported() -> None:
    """An exception, a signal, an exit, and a result that cannot be pickled; the next cell is not affected."""
    found, output, _ = run("""
import signal
def raising(): raise ValueError("of this rank")
def ends(): os._exit(7)
def leaves(): sys.exit(0)
def killed(): os.kill(os.getpid(), signal.SIGKILL)
def unpicklable(): return lambda: None
errors = []
for end in (raising, ends, leaves, killed, unpicklable):
    def work(rank):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 2:
            print("here", flush=True)
            return end()
        time.sleep(600)
    try:
        run_forked(four, work, results_of=(2,))
    except forked_ranks.RankFailedError as error:
        errors.append([error.failure.rank, error.failure.status, str(error)])
print(json.dumps([*errors, run_forked(four, lambda rank: "fine", results_of=range(4))]))
""")
    *errors, after = found
    assert [(rank, status) for rank, status, _ in errors] == [(2, 1), (2, 7), (2, 1), (2, 137), (2, 1)]
    messages = [message for _, _, message in errors]
    assert messages[0].startswith("rank 2 failed with exit status 1\nTraceback")
    assert "in raising" in messages[0] and messages[0].endswith("ValueError: of this rank")
    assert messages[1] == "rank 2 failed with exit status 7"
    assert messages[2].endswith("SystemExit: 0")
    assert messages[3] == "rank 2 was killed by SIGKILL"
    assert "pickle" in messages[4]
    assert output.splitlines() == ["[2] here"] * 5
    assert after == {str(rank): "fine" for rank in range(4)}


@needs_namespaces
def test_the_rank_that_failed_first_is_reported_although_another_ends_first() -> None:
    found, _, _ = run("""
def work(rank):
    if rank == 0:
        time.sleep(0.5)
        raise ConnectionError("closed by rank 3")
    if rank == 3:
        sys.stdout.flush = lambda: time.sleep(600)
        raise ValueError("the cause")
    time.sleep(600)
try:
    run_forked(four, work)
except forked_ranks.RankFailedError as error:
    print(json.dumps([error.failure.rank, error.traceback]))
""")
    assert found[0] == 3
    assert found[1].endswith("ValueError: the cause\n")


@needs_namespaces
def test_a_deadline_stops_ranks_that_hang_and_shows_where() -> None:
    found, _, errors = run("""
def hanging_here(rank):
    time.sleep(600)
begun = time.monotonic()
run_forked(four, lambda rank: None)
limit = 1 + 3 * (time.monotonic() - begun)  # all ranks must have started, on a busy machine too
begun = time.monotonic()
try:
    run_forked(four, hanging_here, deadline_seconds=limit)
except TimeoutError as error:
    print(json.dumps([time.monotonic() - begun - limit, str(error)]))
""")
    assert 0 <= found[0] < 30
    assert found[1] == "the ranks of an emulated cluster did not end before their deadline"
    stacks = {line.split("]")[0] for line in errors if "in hanging_here" in line}
    assert stacks == {"[0", "[1", "[2", "[3"}


def test_a_process_with_threads_is_not_forked() -> None:
    wait = threading.Event()
    thread = threading.Thread(target=wait.wait)
    thread.start()
    try:
        cluster = Cluster(Topology.parse("gpu=2"), {"gpu": 50}, tuple(map(namespaces.address, range(2))))
        with pytest.raises(RuntimeError, match="a single thread, and this one has"):
            forked_ranks.run_forked(cluster, lambda rank: None)
    finally:
        wait.set()
        thread.join()


def test_missing_permissions_are_reported() -> None:
    found, _, _ = run("""
from xfuser_cocodiff.lab.emulation import user_namespace
def refuse(): raise RuntimeError("not permitted here")
user_namespace._enter = refuse
try:
    run_forked(four, lambda rank: None)
except RuntimeError as error:
    print(json.dumps(str(error)))
""")
    assert found == "not permitted here"


SENDING = """
def received(peer, size):
    '''Wait for `size` bytes on a connection and answer with one.'''
    while size:
        size -= len(peer.recv(min(size, 1 << 16)))
    peer.sendall(b".")

def connected(address):
    while True:
        try:
            return socket.create_connection((address, 5000))
        except ConnectionRefusedError:
            time.sleep(0.01)

def send(rank, cluster, size, before_each):
    '''Send to all other ranks from rank 0 at once, repeatedly. Return seconds of each time.'''
    if rank:
        with socket.create_server((cluster.addresses[rank], 5000)) as server:
            peer = server.accept()[0]
        for _ in before_each:
            received(peer, size)
        return None
    peers = [connected(address) for address in cluster.addresses[1:]]
    seconds = []
    for before in before_each:
        before()
        started = time.perf_counter()
        def transfer(peer):
            peer.sendall(bytes(size))
            peer.recv(1)
        threads = [threading.Thread(target=transfer, args=(peer,)) for peer in peers]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        seconds.append(time.perf_counter() - started)
    return seconds
"""


@pytest.mark.alone
@needs_namespaces
def test_peers_of_a_port_share_its_rate_and_bytes_are_counted() -> None:
    """To five peers on links of 8 Mbit/s each, 400 kB each take 0.4 s; on one port of 8 Mbit/s, 2 s."""
    found, _, _ = run(
        SENDING
        + """
size = 400_000
def work(rank):
    cluster = links.of_this_rank()
    seconds = send(rank, cluster, size, [lambda: None])
    return seconds, counters.payload_bytes()
cells = emulated("gpu=6", gpu=8), emulated("gpu=6", ("gpu",), gpu=8)
print(json.dumps([run_forked(cell, work, results_of=(0, 1)) for cell in cells]))
"""
    )
    (links_seconds, links_bytes), (port_seconds, port_bytes) = (cell["0"] for cell in found)
    assert 0.3 < links_seconds[0] < 1.8 < port_seconds[0]
    for counted in (links_bytes, port_bytes):
        assert counted == {"gpu": pytest.approx(2_000_000, rel=0.03)}
    for cell in found:
        assert cell["1"][1]["gpu"] < 100  # an answer of one byte, and acknowledgements


@pytest.mark.alone
@needs_namespaces
def test_ranks_change_their_dilation_under_open_connections() -> None:
    """500 kB at 20 Mbit/s are 0.2 s; at five times the dilation, 1 s."""
    found, _, _ = run(
        SENDING
        + """
from xfuser_cocodiff.engine.topology.link_profile import AxisLink, Profile
slow = dilation.slow_cluster(Profile(Topology.parse("gpu=2"), (AxisLink("gpu", 0, 2.5e9),), 0, 1, 1), 1000)
def work(rank):
    changes = [lambda: None, lambda: dilation.change_dilation(5000)]
    return send(rank, slow, 500_000, changes), links.of_this_rank().rate("gpu"), counters.payload_bytes()
print(json.dumps(run_forked(slow, work)[0]))
"""
    )
    (fast, slow), rate, counted = found
    assert rate == pytest.approx(4)
    assert 0.15 < fast < 0.9 < slow < 5
    assert counted == {"gpu": pytest.approx(1_000_000, rel=0.03)}
