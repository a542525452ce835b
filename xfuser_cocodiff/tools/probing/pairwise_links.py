"""Point-to-point latency and bandwidth of every pair of ranks."""

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

PINGS, PING_BYTES = 15, 8
"""Short messages per pair, and their bytes. The minimum counts: longer times contain scheduling delays of the host."""
FIRST_BYTES, LAST_BYTES, GROWTH = 1 << 14, 1 << 26, 4
"""Message sizes: the first is ten packets of a slow link, the last fits any memory."""
ENOUGH_SECONDS = 0.02
"""Transfer time from which a message counts as large enough: a hundred times the cost of a launch, and long enough to
hide the burst that a token bucket lets through."""
BRIEF_SECONDS = 0.1
"""Shorter transfers are repeated three times, and the minimum counts."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Latency and bandwidth of all pairs of P ranks.

    Matrices are (P, P), from the row's rank to the column's; the diagonal is NaN.
    """

    latency_seconds: np.ndarray
    """Time until 8 bytes have arrived while both ranks of a pair send."""
    bytes_per_second: np.ndarray
    """Bidirectional bandwidth while every rank communicates with at most one peer."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.latency_seconds)

    def to_json(self) -> dict[str, Any]:
        """Return the matrices as lists of rows, with null on the diagonal."""
        return {
            name: [[None if math.isnan(value) else value for value in row] for row in matrix.tolist()]
            for name, matrix in vars(self).items()
        }


def measure_pairs(
    group: dist.ProcessGroup | None = None, device: str | torch.device = "cpu", timeout: float = TIMEOUT_SECONDS
) -> Pairs:
    """Measure every pair of ranks of a group. Collective: every rank must call it.

    Takes a few seconds: each pair grows its messages until one takes tens of milliseconds.

    Args:
        group: a gloo, nccl or xccl group; the default group if None.
        device: device of the messages.
        timeout: seconds for the whole measurement.

    Returns:
        The measurements, the same on every rank.

    Raises:
        RuntimeError: a rank failed or did not answer in time; names it.
    """
    return _PairProbe(group, torch.device(device), timeout).measure()


def rounds(size: int) -> Iterator[list[int]]:
    """Yield the rounds of a round-robin tournament: for each round the peer of every rank; an idle rank has itself.

    Every rank meets every other rank exactly once, in `size - 1` rounds (`size` if odd).
    """
    slots = size + size % 2  # the last slot of an odd size means idle
    for turn in range(slots - 1):
        # Circle method: the last slot is fixed and the others rotate around it.
        peers = [(turn - rank) % (slots - 1) for rank in range(slots - 1)]
        unpaired = next(rank for rank, peer in enumerate(peers) if rank == peer)
        peers[unpaired] = slots - 1
        peers.append(unpaired)
        yield [peer if peer < size else rank for rank, peer in enumerate(peers[:size])]


class _PairProbe:
    """One rank's side of the measurement."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: float) -> None:
        self._group, self._device = group or dist.group.WORLD, device
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        # One deadline for all transfers, so that ranks that wait for each other time out together.
        self._deadline = time.monotonic() + timeout

    def measure(self) -> Pairs:
        failure_detection.start_heartbeat()
        self._gather_from_all(torch.zeros(1))  # a barrier, which also makes the backend connect all ranks
        latency, bandwidth = ([math.nan] * self._size for _ in range(2))  # from each peer to this rank
        for peers in rounds(self._size):
            if (peer := peers[self._rank]) != self._rank:
                latency[peer], bandwidth[peer] = self._latency(peer), self._bandwidth(peer)
        return Pairs(self._assemble(latency), self._assemble(bandwidth))

    def _latency(self, peer: int) -> float:
        times = [self._round_trip(peer, PING_BYTES) for _ in range(PINGS)]
        return min(times[1:])  # the first one opens the connection

    def _bandwidth(self, peer: int) -> float:
        size, seconds = FIRST_BYTES, self._round_trip(peer, FIRST_BYTES)
        while self._decide(peer, seconds < ENOUGH_SECONDS and size < LAST_BYTES):
            size *= GROWTH
            seconds = self._round_trip(peer, size)
        if self._decide(peer, seconds < BRIEF_SECONDS):
            seconds = min(seconds, self._round_trip(peer, size), self._round_trip(peer, size))
        return size / seconds

    def _decide(self, peer: int, proposal: bool) -> bool:
        """Return the proposal of the lower of the two ranks, so that both make the same decision."""
        decision = torch.tensor([proposal], dtype=torch.uint8, device=self._device)
        self._wait(self._post((dist.isend if self._rank < peer else dist.irecv, decision, peer)), peer)
        return bool(decision.item())

    def _round_trip(self, peer: int, size: int) -> float:
        """Send and receive `size` bytes at once; return the seconds until the peer's message has arrived."""
        for count in (1, size):  # the first byte synchronizes the pair
            sent, received = (torch.zeros(count, dtype=torch.uint8, device=self._device) for _ in range(2))
            self._synchronize()
            started = time.perf_counter()
            # Receives come first: gloo announces them on the same connection, where they would queue behind a message
            # that is being sent, which would serialize the two directions.
            receive, *send = self._post((dist.irecv, received, peer), (dist.isend, sent, peer))
            self._wait([receive], peer)
            seconds = time.perf_counter() - started
            self._wait(send, peer)
        return seconds

    def _post(self, *operations: tuple[Any, torch.Tensor, int]) -> list[dist.Work]:
        """Start sends and receives as one batch, as NCCL requires; return one work per operation if the backend can."""
        with self._reporting({peer for *_, peer in operations}):
            return dist.batch_isend_irecv(
                [dist.P2POp(what, data, group=self._group, group_peer=peer) for what, data, peer in operations]
            )

    def _wait(self, works: list[dist.Work], *peers: int) -> None:
        with self._reporting({*peers}):
            for work in works:
                work.wait(timedelta(seconds=max(self._deadline - time.monotonic(), 0.001)))
        self._synchronize()

    def _reporting(self, peers: set[int]) -> failure_detection.report_failed_ranks:
        members = dist.get_process_group_ranks(self._group)
        return failure_detection.report_failed_ranks([members[rank] for rank in sorted({self._rank, *peers})], "probe")

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _gather_from_all(self, values: torch.Tensor) -> torch.Tensor:
        """All-gather values of every rank, shape (P, ...)."""
        values, all_ranks = values.to(self._device), set(range(self._size))
        gathered = [torch.empty_like(values) for _ in all_ranks]
        with self._reporting(all_ranks):
            work = dist.all_gather(gathered, values, self._group, async_op=True)
        self._wait([work], *all_ranks)
        return torch.stack(gathered).cpu()

    def _assemble(self, column: list[float]) -> np.ndarray:
        """Return the matrix of which every rank holds its own column."""
        return self._gather_from_all(torch.tensor(column)).numpy().T.astype(float)
