"""Measures the links between every two ranks: latency and bandwidth."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.comm import failure_detection

TIMEOUT_SECONDS = 120.0

PINGS = 15
"""Round trips of a pair, of which the fastest counts: what others take longer is the machine's time, not the link's."""
FIRST_BYTES, LAST_BYTES, GROWTH = 1 << 14, 1 << 26, 4
"""Sizes of messages between a pair: the first is ten packets of a slow link, the last fits any memory."""
ENOUGH_SECONDS = 0.02
"""A message is large enough when it takes this long: a hundred times what it costs to send any, and what a token bucket
lets pass for free does not show."""
BRIEF_SECONDS = 0.1
"""What takes less is done three times, of which the fastest counts."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """What was measured between every two of P ranks. Matrices are (P, P): from the row's rank to the column's.

    On the diagonal there is nothing to measure: NaN.
    """

    latency_seconds: np.ndarray
    """Half a round trip of a few bytes."""
    bytes_per_second: np.ndarray
    """While the pair sends to each other, and every other rank is busy with one other peer at most."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.latency_seconds)

    def to_json(self) -> dict[str, Any]:
        """The matrices as lists of rows, with null on the diagonal."""
        return {name: _rows(matrix) for name, matrix in vars(self).items()}


def measure_pairs(
    group: dist.ProcessGroup | None = None, device: str | torch.device = "cpu", timeout: float = TIMEOUT_SECONDS
) -> Pairs:
    """Measure every two ranks of a group. Every rank of it must call this; all get the same result.

    Takes a few seconds: messages grow until they take tens of milliseconds, which each pair agrees on for itself.

    Args:
        group: with gloo, nccl or xccl; the default group if None.
        device: where the messages lie.
        timeout: seconds after which ranks that do not answer are given up.

    Raises:
        RuntimeError: a rank is gone, or did not answer in time.
    """
    return _Meter(group, torch.device(device), timeout).measure()


def rounds(size: int) -> Iterator[list[int]]:
    """The rounds of a tournament: for each round the peer of every rank, and itself for one that has to pause.

    In as many rounds as there are peers (one more where somebody has to pause) every rank meets every other once.
    """
    places = size + size % 2  # the last place of an odd number is the pause
    for turn in range(places - 1):
        # The last place stays where it is, and the others turn around it: the circle method.
        peers = [(turn - rank) % (places - 1) for rank in range(places - 1)]
        alone = next(rank for rank, peer in enumerate(peers) if rank == peer)
        peers[alone] = places - 1
        peers.append(alone)
        yield [peer if peer < size else rank for rank, peer in enumerate(peers[:size])]


class _Meter:
    """Sends and takes times, on one rank."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: float) -> None:
        self._group, self._device = group or dist.group.WORLD, device
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        # One for all that follows: ranks that wait for each other then give up together.
        self._deadline = time.monotonic() + timeout

    def measure(self) -> Pairs:
        failure_detection.attend()
        self._come_together()  # also opens what the backend opens with all ranks together
        latency, bandwidth = self._nothing(), self._nothing()
        for peers in rounds(self._size):
            if (peer := peers[self._rank]) != self._rank:
                # From the peer to here.
                latency[peer, self._rank] = self._latency(peer)
                bandwidth[peer, self._rank] = self._bandwidth(peer)
        return Pairs(self._gathered(latency), self._gathered(bandwidth))

    def _latency(self, peer: int) -> float:
        times = []
        ball = torch.zeros(8, dtype=torch.uint8, device=self._device)
        serves = self._rank < peer
        self._exchange(peer, 1)  # which opens the connection
        for _ in range(PINGS):
            started = time.perf_counter()
            for sends in (serves, not serves):
                self._wait(self._post(dist.isend if sends else dist.irecv, ball, peer), peer)
            times.append(time.perf_counter() - started)
        # The fastest but the first, which may find the ball there already.
        return min(times[1:]) / 2

    def _bandwidth(self, peer: int) -> float:
        size, spent = FIRST_BYTES, self._exchange(peer, FIRST_BYTES)
        while self._agreed(peer, spent < ENOUGH_SECONDS and size < LAST_BYTES):
            size *= GROWTH
            spent = self._exchange(peer, size)
        if self._agreed(peer, spent < BRIEF_SECONDS):
            spent = min(spent, self._exchange(peer, size), self._exchange(peer, size))
        return size / spent

    def _agreed(self, peer: int, wish: bool) -> bool:
        """What the lower of two ranks wants: both have to do the same."""
        wishes = torch.tensor([wish], dtype=torch.uint8, device=self._device)
        self._wait(self._post(dist.isend if self._rank < peer else dist.irecv, wishes, peer), peer)
        return bool(wishes.item())

    def _exchange(self, peer: int, size: int) -> float:
        """Seconds until a message from a peer is here, while it gets as large a one."""
        for count in (1, size):  # the first says that the peer is there
            there, here = (torch.zeros(count, dtype=torch.uint8, device=self._device) for _ in range(2))
            self._synchronize()
            started = time.perf_counter()
            # Receives come first: gloo announces them on the same connection, where they would queue behind a message
            # that is sent, and the two directions would then follow each other.
            received, *sent = self._post_all([(dist.irecv, here, peer), (dist.isend, there, peer)])
            self._wait([received], peer)
            spent = time.perf_counter() - started
            self._wait(sent, peer)
        return spent

    def _post(self, operation: Any, message: torch.Tensor, peer: int) -> list[dist.Work]:
        return self._post_all([(operation, message, peer)])

    def _post_all(self, operations: list[tuple[Any, torch.Tensor, int]]) -> list[dist.Work]:
        """Start sends and receives together, as NCCL needs them; one work for each where the backend has that."""
        with self._naming({peer for *_, peer in operations}):
            return dist.batch_isend_irecv(
                [dist.P2POp(what, data, group=self._group, group_peer=peer) for what, data, peer in operations]
            )

    def _wait(self, works: list[dist.Work], *peers: int) -> None:
        with self._naming({*peers}):
            for work in works:
                work.wait(timedelta(seconds=max(self._deadline - time.monotonic(), 0.001)))
        self._synchronize()

    def _naming(self, peers: set[int]) -> failure_detection.report_failed_ranks:
        members = dist.get_process_group_ranks(self._group)
        return failure_detection.report_failed_ranks([members[rank] for rank in sorted({self._rank, *peers})], "probe")

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _come_together(self) -> None:
        self._of_all(torch.zeros(1))

    def _of_all(self, values: torch.Tensor) -> torch.Tensor:
        """What every rank holds, shape (P, ...)."""
        values, everybody = values.to(self._device), set(range(self._size))
        found = [torch.empty_like(values) for _ in everybody]
        with self._naming(everybody):
            work = dist.all_gather(found, values, self._group, async_op=True)
        self._wait([work], *everybody)
        return torch.stack(found).cpu()

    def _nothing(self) -> np.ndarray:
        return np.zeros((self._size, self._size))

    def _gathered(self, column: np.ndarray) -> np.ndarray:
        """The matrix of which every rank has its own column, and zeros elsewhere."""
        columns = self._of_all(torch.tensor(column[:, self._rank], dtype=torch.float32))
        gathered = columns.numpy().T.astype(float)
        np.fill_diagonal(gathered, math.nan)
        return gathered


def _rows(matrix: np.ndarray) -> list[list[float | None]]:
    return [[None if math.isnan(value) else value for value in row] for row in matrix.tolist()]
