"""Self-check of an emulated cluster: what its links carry against what was asked, over plain TCP connections.

The module is also the program that measures, once per rank.
"""

import dataclasses
import functools
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from typing import Any

from xfuser_cocodiff.emulation.links import Cluster, from_environment
from xfuser_cocodiff.emulation.ranks import STDOUT
from xfuser_cocodiff.reporting import host

COMMAND = (sys.executable, "-m", "xfuser_cocodiff.emulation.link_check")
TOLERANCE = 0.15
"""How far the median of an axis may be off what was asked."""
SECONDS = 1.0
"""For which every link is kept busy."""
MIN_BYTES = 1 << 14
"""To each rank, however slow the link: less would be over before the shaper has anything to do."""
REST_SECONDS = 0.001
"""Between two looks at what has arrived: to wake up for every packet costs more than to send it."""
PATIENCE_SECONDS = 60.0
"""For which ranks wait for each other: a guard, not a bound on speed."""

DATA_PORT = 29501
LENGTH_BYTES = 8
CHUNK = memoryview(bytes(1 << 16))


@dataclasses.dataclass(frozen=True)
class AxisFigures:
    """What the links along an axis carry, in Mbit/s."""

    axis: str
    links: int
    asked: float
    median: float
    min: float
    max: float

    @property
    def ratio(self) -> float:
        """Median over asked."""
        return self.median / self.asked


class Findings:
    """Collects what the measuring ranks say."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._achieved: dict[str, list[float]] = {axis: [] for axis in cluster.rates}

    def write(self, rank: int, descriptor: int, line: bytes) -> None:
        """Take a line of a rank: a link's axis and Mbit/s, or an error to show."""
        if descriptor == STDOUT:
            axis, achieved = line.split()
            self._achieved[axis.decode()].append(float(achieved))
        else:
            print(f"[{rank}] {line.decode(errors='replace')}", file=sys.stderr, flush=True)

    def figures(self) -> list[AxisFigures]:
        """One per axis, outermost first."""
        return [
            AxisFigures(axis, len(found), self._cluster.rate(axis), statistics.median(found), min(found), max(found))
            for axis, found in self._achieved.items()
        ]

    def off(self) -> list[str]:
        """Axes whose median is not what was asked."""
        return [row.axis for row in self.figures() if abs(row.ratio - 1) > TOLERANCE]

    def table(self) -> str:
        """The figures for reading."""
        lines = ["Mbit/s  links     asked    median       min       max   ratio"]
        for row in self.figures():
            rates = "".join(f"{rate:10.2f}" for rate in (row.asked, row.median, row.min, row.max))
            lines.append(f"{row.axis:6}{row.links:7}{rates}{row.ratio:8.3f}")
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """The figures for other programs."""
        return {
            **host.header(),
            "cluster": json.loads(self._cluster.to_json()),
            "axes": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in self.figures()],
        }


def main() -> int:
    """Measure the links of this rank, one axis after the other, and print a line for each; all ranks call this."""
    cluster, rank = from_environment(), int(os.environ["RANK"])
    receiver = _receiver(cluster.addresses[rank])
    receiver.rounds += 1
    transfers: dict[str, list[_Transfer]] = {axis: [] for axis in cluster.rates}
    for link in cluster.links(rank):  # once all other ranks listen, none of them takes the processor to start
        transfers[link.axis].append(_Transfer(cluster, link.ranks, cluster.rate(link.axis)))
    for axis, along in transfers.items():
        for transfer in along:
            transfer.start()
        for transfer in along:
            print(axis, transfer.finish(), flush=True)
    receiver.wait({*cluster.addresses} - {cluster.addresses[rank]})
    return 0


class _Transfer:
    """Keeps one link busy, towards all ranks that it leads to."""

    def __init__(self, cluster: Cluster, ranks: tuple[int, ...], rate: float) -> None:
        self._bytes = max(round(rate * 1e6 / 8 * SECONDS / len(ranks)), MIN_BYTES)
        self._sockets = [connect(cluster.addresses[peer], DATA_PORT) for peer in ranks]
        self._threads = [threading.Thread(target=self._send, args=(peer,), daemon=True) for peer in self._sockets]
        self._answers: list[bytes] = []

    def start(self) -> None:
        self._started = time.perf_counter()
        for thread in self._threads:
            thread.start()

    def _send(self, peer: socket.socket) -> None:
        with peer:
            peer.sendall(self._bytes.to_bytes(LENGTH_BYTES, "big"))
            left = self._bytes
            while left:
                left -= peer.send(CHUNK[: min(left, len(CHUNK))])
            self._answers.append(peer.recv(1))  # which says that all has arrived
            self._ended = time.perf_counter()

    def finish(self) -> float:
        """Wait for the end and return Mbit/s."""
        for thread in self._threads:
            thread.join()
        if self._answers != [b"!"] * len(self._threads):
            raise ConnectionError("a transfer ended before all had arrived")
        return self._bytes * len(self._threads) * 8 / 1e6 / (self._ended - self._started)


class _Receiver:
    """Takes in what others send to this rank, as long as it lives, and tells them when all has arrived."""

    def __init__(self, address: str) -> None:
        self.rounds = 0
        """In which each other rank sends once."""
        self._received: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._server = socket.create_server((address, DATA_PORT), backlog=256)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            threading.Thread(target=self._receive, args=self._server.accept(), daemon=True).start()

    def _receive(self, peer: socket.socket, address: tuple[str, int]) -> None:
        buffer = bytearray(1 << 18)
        with peer:
            left = int.from_bytes(peer.recv(LENGTH_BYTES, socket.MSG_WAITALL), "big")
            while left and (count := peer.recv_into(buffer, min(left, len(buffer)))):
                left -= count
                time.sleep(REST_SECONDS)
            if not left:
                peer.sendall(b"!")
        with self._changed:
            self._received[address[0]] += 1
            self._changed.notify()

    def wait(self, peers: set[str]) -> None:
        """Wait for all rounds so far of all peers."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: all(self._received[peer] >= self.rounds for peer in peers), PATIENCE_SECONDS
            ):
                raise ConnectionError("nothing came from another rank")


_receiver = functools.cache(_Receiver)


def connect(address: str, port: int) -> socket.socket:
    """Connect to a rank that may not be listening yet."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return socket.create_connection((address, port), timeout=PATIENCE_SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
