"""Ulysses all-to-alls of other systems: encoded rows, without state, in one message or in one for each tensor.

Sizes in shapes: P ranks of the Ulysses group, B batch, H heads, h = H / P, S sequence, D head dim, n bytes of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from xfuser_cocodiff.lab.cluster_bench.coding_kernels import (
    RAW,
    column_statistics,
    decode_rows,
    encode_rows,
    merge_statistics,
    row_bytes,
)
from xfuser_cocodiff.lab.comparison.baselines import hadamard, rotate
from xfuser_cocodiff.lab.comparison.row_codes import INT8, STATIC_FP8

_HEADS, _SEQUENCE = 1, 2
_Chosen = tuple[str, torch.Tensor, torch.Tensor | None]
"""Letter, tensor and statistic of a part of a message."""
_InFlight = tuple[torch.Tensor, torch.Size]
"""Message in flight, flattened, and its shape."""
_KINDS = {INT8.name: "mean", STATIC_FP8.name: "amax"}
"""Statistics of columns that FlashInfer's codes need."""


@dataclass(frozen=True)
class UlyssesCodes:
    """How a system sends Q, K, V and O in the all-to-alls of Ulysses."""

    codes: Mapping[str, str] = field(default_factory=dict)
    """Names in :data:`row_codes.CODES` by letter; other letters are sent as they are."""
    one_message: bool = True
    """Whether Q, K and V of the same shape are sent in one message."""
    overlaps: bool = False
    """Whether the all-to-all of one tensor runs while the next is encoded."""
    rotates: bool = False
    """Whether Q and K are multiplied by a Hadamard matrix before they are encoded, which leaves attention as it is."""
    gathers_statistics: str = ""
    """Letters whose codes use statistics of all tokens, which an all-gather collects before."""

    def row_bytes(self, letter: str, dim: int, itemsize: int = 2) -> int:
        """Return the bytes of one row of `dim` values of q, k, v or o."""
        return row_bytes(self.codes.get(letter, RAW), dim, itemsize)


class CodedUlysses:
    """All-to-alls of one Ulysses group by a system's codes."""

    def __init__(self, codes: UlyssesCodes, group: dist.ProcessGroup) -> None:
        self._codes, self._group = codes, group
        self._size, self._rank = group.size(), group.rank()
        self._rotation: torch.Tensor | None = None
        """Hadamard matrix of Q and K, made once."""

    def exchange_inputs(self, names: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors (B, H, S/P, D), named by letters, as (B, h, S, D)."""
        if self._codes.rotates and {"q", "k"} <= {*names}:  # alone, they may be joined by text that is not rotated
            if self._rotation is None:
                self._rotation = hadamard(tensors[0])
            tensors = [
                rotate(each, self._rotation) if name in "qk" else each
                for name, each in zip(names, tensors, strict=True)
            ]
        statistics = self._statistics(names, tensors)
        together = self._codes.one_message and all(each.shape == tensors[0].shape for each in tensors)
        messages = [range(len(tensors))] if together else [range(index, index + 1) for index in range(len(tensors))]
        in_flight, received = [], []
        for indices in messages:
            chosen = [(names[index], tensors[index], statistics[index]) for index in indices]
            in_flight.append((chosen, self._start_inputs(chosen)))
            if not self._codes.overlaps:
                received += self._finish_inputs(*in_flight.pop())
        for each in in_flight:
            received += self._finish_inputs(*each)
        return received

    def exchange_output(self, output: torch.Tensor) -> torch.Tensor:
        """Return O (B, h, S, D) as (B, H, S/P, D)."""
        codes = [self._codes.codes.get("o", RAW)]
        rows = output.unflatten(_SEQUENCE, (self._size, -1)).permute(2, 1, 0, 3, 4)
        message = self._finish(self._start(encode_rows([rows], codes, [None])))  # (P, h, B, S/P, n)
        [decoded] = decode_rows(message.permute(2, 0, 1, 3, 4), codes, [output.shape[-1]], [None], output.dtype)
        return decoded.flatten(1, 2)

    def _start_inputs(self, chosen: list[_Chosen]) -> _InFlight:
        rows = [self._by_destination(tensor) for _, tensor, _ in chosen]
        codes = [self._codes.codes.get(name, RAW) for name, _, _ in chosen]
        statistics = [None if each is None else self._by_destination(each) for _, _, each in chosen]
        return self._start(encode_rows(rows, codes, statistics))

    def _finish_inputs(self, chosen: list[_Chosen], in_flight: _InFlight) -> list[torch.Tensor]:
        codes = [self._codes.codes.get(name, RAW) for name, _, _ in chosen]
        message = self._finish(in_flight).permute(2, 1, 0, 3, 4)  # (B, h, P, S/P, n)
        statistics = [None if each is None else self._of_own_heads(each) for _, _, each in chosen]
        dims, dtype = [tensor.shape[-1] for _, tensor, _ in chosen], chosen[0][1].dtype
        return [each.flatten(2, 3) for each in decode_rows(message, codes, dims, statistics, dtype)]

    def _by_destination(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view (P, h, B, S, D) of a tensor (B, H, S, D)."""
        return tensor.unflatten(_HEADS, (self._size, -1)).permute(1, 2, 0, 3, 4)

    def _of_own_heads(self, statistic: torch.Tensor) -> torch.Tensor:
        """Return the statistic (B, H, 1, D) of the heads of this rank, (B, h, 1, 1, D)."""
        heads = statistic.shape[_HEADS] // self._size
        return statistic[:, self._rank * heads : (self._rank + 1) * heads, None]

    def _statistics(self, names: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the statistics (B, H, 1, D) of each tensor over all tokens; None where its code needs none."""
        by_name: dict[str, torch.Tensor] = {}
        needed = [name for name in names if name in self._codes.gathers_statistics]
        chosen = [tensors[names.index(name)] for name in needed]
        if len({each.shape for each in chosen}) > 1:
            for name, tensor in zip(needed, chosen, strict=True):
                by_name |= self._gather_statistics([name], [tensor])
        elif chosen:
            by_name = self._gather_statistics(needed, chosen)
        return [by_name.get(name) for name in names]

    def _gather_statistics(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        kinds = [_KINDS[self._codes.codes[name]] for name in names]
        own = column_statistics(tensors, kinds)
        gathered = wait(collectives.all_gather_single(own.flatten(), 0, self._group)).view(-1, *own.shape)
        return dict(zip(names, merge_statistics(gathered, kinds), strict=True))

    def _start(self, message: torch.Tensor) -> _InFlight:
        """Start the all-to-all of a message (P, ...)."""
        return collectives.all_to_all_single(message.flatten(), None, None, self._group), message.shape

    @staticmethod
    def _finish(in_flight: _InFlight) -> torch.Tensor:
        """Wait for a message. A view of it before would already wait."""
        message, shape = in_flight
        return wait(message).view(shape)


def wait(in_flight: torch.Tensor) -> torch.Tensor:
    """Return the result of a functional collective once it has arrived."""
    return in_flight.wait() if isinstance(in_flight, collectives.AsyncCollectiveTensor) else in_flight
