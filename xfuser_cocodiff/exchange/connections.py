"""Connections between the CPUs of a group, for messages that are short enough for the kernel to hold.

Gloo asks a receiver before it sends to it, and a thread of its own reads what comes: each message wakes threads several
times, and where ranks compute on the same cores that takes longer than the message. Here a message is written when it
is sent and read when it is waited for; between the two, the kernel carries it.
"""

import fcntl
import logging
import math
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

T = TypeVar("T")
SHORT = 2**17
"""Bytes of a message up to which it goes this way: what systems are ready to keep for a connection while nobody reads.
Of longer ones, the rest would wait for its sender to come back."""
_WAKING = 2**15
"""Bytes of a longer message that wake who waits for it."""
_PATIENCE_SECONDS = 10.0
"""In which two ranks must have come together."""
_GREETING_SECONDS = 1.0
"""In which a rank that has come must have said who it is."""
_HELLO = struct.Struct("!16sI")
"""A word that only ranks of the group know, and the rank that says it."""
_GET_ADDRESS = 0x8915
"""Linux's request for the address of an interface."""

_logger = logging.getLogger("xfuser_cocodiff")
_made: "WeakKeyDictionary[dist.ProcessGroup, Connections | None]" = WeakKeyDictionary()
"""As many as there are groups, however many meshes use them."""


def between(group: dist.ProcessGroup) -> "Connections | None":
    """The connections of a group's ranks, all of which must call this; None where some two of them do not come
    together, as where a firewall stands between them, and where there is nobody to turn to."""
    if group.size() == 1:
        return None
    if group not in _made:
        _made[group] = _connected(group)
        if _made[group] is None and group.rank() == 0:
            ranks = dist.get_process_group_ranks(group)
            _logger.warning("cocodiff: ranks %s do not reach each other; short messages go by gloo, and slower", ranks)
    return _made[group]


class Swap:
    """A message to each other rank, and one from each, under way."""

    def __init__(self, connections: "Connections", rooms: Sequence[memoryview]) -> None:
        self._connections, self.rooms = connections, rooms
        self.is_received = False
        self.unsent: set[int] = set()
        """Ranks whose message the kernel has not taken whole."""

    def wait(self, timeout: timedelta = default_pg_timeout) -> None:
        """Wait until all has come, and all that was sent may be written to again.

        Raises:
            DistNetworkError: a connection is gone, or its rank does not answer in time.
        """
        self._connections.finish(self, timeout.total_seconds())


class Connections:
    """Connections of a rank to all others of its group.

    Messages between two ranks keep the order in which they were sent. A thread may send while another one waits.

    Args:
        here: this rank of the group.
        sockets: to each other one.
    """

    def __init__(self, here: int, sockets: Mapping[int, socket.socket]) -> None:
        self._here, self.size, self._sockets = here, len(sockets) + 1, sockets
        away = range(1, self.size)
        self._destinations = [(here + distance) % self.size for distance in away]
        # The one whose message comes last first: who sleeps once for all is woken once.
        self._sources = [(here - distance) % self.size for distance in reversed(away)]
        self._wakes = dict.fromkeys(sockets, 1)
        self._polls = {rank: select.poll() for rank in sockets}
        self._unsent: dict[int, list[tuple[Swap, memoryview]]] = {}
        """By destination, what the kernel has not taken yet, and whose it is."""
        self._swaps: deque[Swap] = deque()
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        for rank, connection in sockets.items():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                connection.setsockopt(socket.SOL_SOCKET, buffer, 2 * SHORT)
            self._polls[rank].register(connection, select.POLLIN)

    def swap(self, sent: torch.Tensor, received: torch.Tensor, gives_all: bool = False) -> Swap:
        """Send each rank its message, or all of them the same one.

        Args:
            sent: contiguous, by destination, this rank's own among them; or one message for all. Must not change
                before the swap was waited for.
            received: contiguous, by source.
            gives_all: whether it is one message.

        Raises:
            DistNetworkError: a connection is gone.
        """
        swap = Swap(self, _parts(_bytes(received), self.size))
        shares = [_bytes(sent)] * self.size if gives_all else _parts(_bytes(sent), self.size)
        swap.rooms[self._here][:] = shares[self._here]
        with self._sending:
            self._swaps.append(swap)
            try:
                for rank in self._destinations:
                    self._send(rank, swap, shares[rank])
            except OSError as error:
                raise self._broken(error) from error
        return swap

    def finish(self, swap: Swap, seconds: float) -> None:
        """Wait for a swap, and for those before it, whose messages come first; see :meth:`Swap.wait`."""
        try:
            with self._receiving:
                while not swap.is_received:
                    first = self._swaps[0]
                    for rank in self._sources:
                        self._receive(rank, first.rooms[rank], seconds)
                    self._swaps.popleft()
                    first.is_received = True
            # Not for what later ones send: their readers may wait for that here too, and nobody would read.
            while swap.unsent:
                self._send_on(None, seconds)
        except OSError as error:
            raise self._broken(error) from error

    def _send(self, rank: int, swap: Swap, message: memoryview) -> None:
        """Give a message to the kernel, behind those that have to wait; what it does not take has to wait too."""
        if rank not in self._unsent:
            with suppress(BlockingIOError):
                message = message[self._sockets[rank].send(message) :]
        if message:
            swap.unsent.add(rank)
            self._unsent.setdefault(rank, []).append((swap, message))
        else:
            swap.unsent.discard(rank)

    def _receive(self, rank: int, room: memoryview, seconds: float) -> None:
        while room:
            try:
                count = self._sockets[rank].recv_into(room)
            except BlockingIOError:
                self._await(rank, len(room), seconds)
                continue
            if not count:
                raise ConnectionResetError(f"rank {rank} of the group has closed it")
            room = room[count:]

    def _await(self, rank: int, missing: int, seconds: float) -> None:
        """Sleep until what is missing of a message has come, or much of it; send on meanwhile."""
        wakes = min(missing, _WAKING)
        if wakes != self._wakes[rank]:
            self._sockets[rank].setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes)
            self._wakes[rank] = wakes
        if self._unsent:
            self._send_on(rank, seconds)
        elif not self._polls[rank].poll(_milliseconds(seconds)):
            raise TimeoutError(f"timed out: nothing came from rank {rank} of the group in {seconds:g} s")

    def _send_on(self, source: int | None, seconds: float) -> None:
        """Sleep until some of what waits can be sent, or something has come from a rank, and send it."""
        with self._sending:
            waiting = list(self._unsent)
        poll = select.poll()
        for rank in {*waiting, *([] if source is None else [source])}:
            poll.register(self._sockets[rank], select.POLLOUT * (rank in waiting) | select.POLLIN * (rank == source))
        if waiting and not poll.poll(_milliseconds(seconds)):
            raise TimeoutError(f"timed out: ranks {waiting} of the group took nothing in {seconds:g} s")
        with self._sending:
            for rank in waiting:
                for swap, message in self._unsent.pop(rank, ()):
                    self._send(rank, swap, message)

    def _broken(self, error: OSError) -> dist.DistNetworkError:
        """What to raise: of a message that came in part, nobody knows where the next one begins."""
        self.close()
        return dist.DistNetworkError(f"a connection failed: {error}")

    def close(self) -> None:
        """Close all of them; those at their other ends learn of it."""
        for connection in self._sockets.values():
            connection.close()

    def __del__(self) -> None:
        self.close()


def _milliseconds(seconds: float) -> int:
    """As far as a poll can wait."""
    return min(math.ceil(1000 * seconds), 2**31 - 1)


def _parts(message: memoryview, count: int) -> list[memoryview]:
    size = len(message) // count
    return [message[start : start + size] for start in range(0, count * size, size)] if size else [message] * count


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


class Listener(NamedTuple):
    """Where a rank is to be found."""

    address: str
    port: int
    word: bytes


def _connected(group: dist.ProcessGroup) -> Connections | None:
    here, size = group.rank(), group.size()
    with ExitStack() as stack:
        try:
            door = stack.enter_context(_listen(size))
            address, port = door.getsockname()[:2]
            own = Listener(address, port, secrets.token_bytes(16))
        except OSError:
            own = None
        listeners = [each for each in _told_by_all(own, group) if each]
        if len(listeners) < size:
            return None
        made = Connections(here, _meet(door, listeners, here))
    if all(_told_by_all(made.size == size, group)):
        return made
    made.close()
    return None


def _told_by_all(what: T, group: dist.ProcessGroup) -> list[T]:
    """What each rank of a group says, in one order."""
    told: list[T] = [what] * group.size()
    dist.all_gather_object(told, what, group)
    return told


def _listen(backlog: int) -> socket.socket:
    if not sys.platform.startswith("linux"):
        raise OSError("what wakes a thread is Linux's")
    if None in _made.values():
        raise OSError("some ranks did not come together, and others would be waited for in vain as well")
    return socket.create_server((_own_address(), 0), backlog=backlog)


def _own_address() -> str:
    """Where others reach this rank: on the interface that gloo was told, else on that from which it reaches the host of
    the rendezvous, else by the host's name."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if name:
            request = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)[20:24])
        if meeting := os.environ.get("MASTER_ADDR"):
            probe.connect((meeting, 9))  # sends nothing
            return probe.getsockname()[0]
    return socket.gethostbyname(socket.gethostname())


def _meet(door: socket.socket, told: list[Listener], here: int) -> dict[int, socket.socket]:
    """Connections to other ranks, perhaps not to all: each turns to those before it."""
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with suppress(OSError):  # the ranks tell each other whether all are there
        for rank, other in enumerate(told[:here]):
            connection = socket.create_connection((other.address, other.port), _PATIENCE_SECONDS)
            connection.sendall(_HELLO.pack(other.word, here))
            found[rank] = connection
        while len(found) < len(told) - 1:
            door.settimeout(max(deadline - time.monotonic(), 0.01))
            connection, _ = door.accept()
            who = _greeted(connection, told[here].word)
            if who is None:
                connection.close()
            else:
                found[who] = connection
    return found


def _greeted(connection: socket.socket, word: bytes) -> int | None:
    """The rank that has come; None of somebody who does not know the word."""
    connection.settimeout(_GREETING_SECONDS)
    try:
        said, rank = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
    except (OSError, struct.error):
        return None
    return rank if secrets.compare_digest(said, word) else None
