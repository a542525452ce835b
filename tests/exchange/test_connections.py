"""Connections between CPUs: what arrives, in which order, and what becomes of the others when one fails."""

import socket
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from xfuser_cocodiff.exchange import connections
from xfuser_cocodiff.exchange.connections import Listener
from xfuser_cocodiff.exchange.mesh import Mesh
from xfuser_cocodiff.machine.plan import Plan
from xfuser_cocodiff.machine.topology import Topology

BEYOND_BUFFERS = 2**23
"""Bytes that no system keeps for a connection unread."""


def message(sender: int, size: int, number: int = 0) -> torch.Tensor:
    """What a rank holds for all: known to everybody."""
    generator = torch.Generator().manual_seed(100 * number + sender)
    return torch.randint(0, 256, (dist.get_world_size(), size), generator=generator, dtype=torch.uint8)


def expected(size: int, number: int = 0) -> torch.Tensor:
    """What arrives at this rank, by the definition of an all-to-all."""
    return torch.stack([message(sender, size, number)[dist.get_rank()] for sender in range(dist.get_world_size())])


def check_arrival(rank: int) -> None:
    """Messages of any size, several under way at once, waited for in whatever order and by whichever thread."""
    made = connections.between(dist.group.WORLD)
    assert made is connections.between(dist.group.WORLD), "connections are made once for a group"
    for size in (0, 1, 7_000, connections.SHORT, BEYOND_BUFFERS):
        received = torch.empty(3, size, dtype=torch.uint8)
        made.swap(message(rank, size), received).wait()
        assert torch.equal(received, expected(size)), size
    sizes = [5, BEYOND_BUFFERS, 6, 70_000]
    sent = [message(rank, size, number) for number, size in enumerate(sizes)]
    received = [torch.empty_like(each) for each in sent]
    swaps = [made.swap(*pair) for pair in zip(sent, received, strict=True)]
    swaps[0].wait()  # while no rank can send what comes after it
    waiting = threading.Thread(target=swaps[2].wait)
    waiting.start()
    for index in (3, 1):
        swaps[index].wait()
    waiting.join()
    for number, size in enumerate(sizes):
        assert torch.equal(received[number], expected(size, number)), number
    gathered = torch.empty(3, 9, dtype=torch.uint8)
    made.swap(message(rank, 9)[0].clone(), gathered, gives_all=True).wait()
    assert torch.equal(gathered, torch.stack([message(sender, 9)[0] for sender in range(3)]))


def test_messages_of_any_size_arrive_in_order() -> None:
    ranks.run(check_arrival, 3)


def check_way(rank: int) -> list[str]:
    """By which way short and long messages go, whatever the plan."""
    topology = Topology.flat(2)
    mesh, taken = Mesh.over(dist.group.WORLD, topology), []
    swap = connections.Connections.swap

    def seen(self: connections.Connections, sent: torch.Tensor, *rest: object) -> connections.Swap:
        taken.append(sent.nbytes // 2)
        return swap(self, sent, *rest)

    with mock.patch.object(connections.Connections, "swap", seen):
        for plan in (Plan.flat(topology), Plan.parse("flat*", topology)):
            for size in (connections.SHORT, connections.SHORT + 1):
                assert torch.equal(mesh.all_to_all(message(rank, size), plan), expected(size))
    return taken


def test_short_messages_take_connections_and_long_ones_the_group() -> None:
    assert ranks.run(check_way, 2) == [[connections.SHORT] * 2] * 2


def _nobody_listens(listener: socket.socket, told: list[Listener], here: int) -> dict[int, socket.socket]:
    listener.close()
    return {}


def check_no_connections(rank: int, broken: str) -> bool:
    """A rank that cannot listen, or whose port nobody reaches: all do without connections, and messages arrive."""
    names = {"listen": ("_listen", mock.Mock(side_effect=OSError)), "meet": ("_meet", _nobody_listens)}
    name, instead = names[broken]
    replaced = instead if rank == 1 else getattr(connections, name)
    with mock.patch.object(connections, name, replaced), mock.patch.object(connections, "_PATIENCE_SECONDS", 1.0):
        mesh = Mesh.over(dist.group.WORLD, Topology.flat(3))
    assert torch.equal(mesh.all_to_all(message(rank, 50), Plan.flat(mesh.topology)), expected(50))
    return bool(mesh.stages.connections)


@pytest.mark.parametrize("broken", ["listen", "meet"])
def test_ranks_that_do_not_come_together_all_use_the_group(broken: str) -> None:
    assert ranks.run(check_no_connections, 3, broken) == [False] * 3


def check_loss(rank: int) -> list[str]:
    """Rank 2 comes late: who waits for it fails in time; so does it, once the others have gone."""
    made, errors = connections.between(dist.group.WORLD), []
    dist.barrier()
    received = torch.empty(3, 10, dtype=torch.uint8)
    if rank == 2:
        time.sleep(2)
    for _ in range(2):
        try:
            made.swap(message(rank, 10), received).wait(timedelta(seconds=0.5))
        except dist.DistNetworkError as error:
            errors.append(str(error))
    return errors


def test_who_waits_for_a_rank_that_does_not_come_fails_in_time() -> None:
    found = ranks.run(check_loss, 3)
    assert [len(errors) for errors in found[:2]] == [2, 2], found
    assert any("timed out" in errors[0] for errors in found[:2]), found
    assert found[2], "what it sends after that, nobody can place"


def test_strangers_are_turned_away() -> None:
    with connections._listen(3) as door:
        address, port = door.getsockname()[:2]
        told = [Listener(address, port, b"a" * 16), Listener(address, port, b"b" * 16)]
        others = [socket.create_connection((address, port)) for _ in range(4)]
        others[0].close()
        others[1].sendall(connections._HELLO.pack(b"x" * 16, 1))
        others[3].sendall(connections._HELLO.pack(b"a" * 16, 1))
        found = connections._meet(door, told, 0)
    others[3].sendall(b"!")
    assert found.keys() == {1}
    assert found[1].recv(1) == b"!"
    for one in [*others, *found.values()]:
        one.close()
