"""Ulysses all-to-alls of other systems: encoded rows, without state, in one message or in one for each tensor.

Their kernels are fused (Triton or CUDA, or what `torch.compile` makes of theirs), so each is one launch that reads its
inputs and writes its outputs once, and recorded tensors have no values.

Sizes in shapes: P ranks of the Ulysses group, B batch, H heads, h = H / P, S sequence, D head dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from benchmarks.accelerator.device import EmulatedAccelerator
from benchmarks.cluster.row_codes import CODES


@dataclass(frozen=True)
class UlyssesCodes:
    """How a system sends Q, K, V and O in the all-to-alls of Ulysses."""

    codes: Mapping[str, str] = field(default_factory=dict)
    """Names in :data:`row_codes.CODES` by letter; other letters are sent as they are."""
    one_message: bool = True
    """Whether Q, K and V of the same shape are sent in one message."""
    rotates: bool = False
    """Whether Q and K are multiplied by a Hadamard matrix before they are encoded, which leaves attention as it is."""

    def row_bytes(self, letter: str, dim: int, itemsize: int = 2) -> int:
        """Return the bytes of one row of `dim` values of q, k, v or o."""
        return CODES[self.codes[letter]].row_bytes(dim) if letter in self.codes else dim * itemsize


class CodedUlysses:
    """All-to-alls of one Ulysses group by a system's codes.

    Args:
        codes: of the system.
        group: the Ulysses group.
        device: runs their kernels.
    """

    def __init__(self, codes: UlyssesCodes, group: dist.ProcessGroup, device: EmulatedAccelerator) -> None:
        self._codes, self._group, self._device = codes, group, device
        self._rotation: torch.Tensor | None = None
        """Hadamard matrix of Q and K, made once."""

    def exchange_inputs(self, names: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors (B, H, S/P, D), named by letters, as (B, h, S, D)."""
        given = dict(zip(names, tensors, strict=True))
        if self._codes.rotates and {"q", "k"} <= {*names}:  # alone, they may be joined by text that is not rotated
            if self._rotation is None:
                self._rotation = given["q"].new_empty(given["q"].shape[-1:] * 2)
            given |= {name: given[name] @ self._rotation for name in "qk"}
        together = self._codes.one_message and len({each.shape for each in given.values()}) == 1
        ranks, received = self._group.size(), list[torch.Tensor]()
        for message in [given] if together else [{name: given[name]} for name in given]:
            sizes = [each.shape for each in message.values()]
            shapes = [(batch, heads // ranks, tokens * ranks, dim) for batch, heads, tokens, dim in sizes]
            received += self._device.run_kernel([self._send(message)], shapes, next(iter(message.values())).dtype)
        return received

    def exchange_output(self, output: torch.Tensor) -> torch.Tensor:
        """Return O (B, h, S, D) as (B, H, S/P, D)."""
        ranks, (batch, heads, tokens, dim) = self._group.size(), output.shape
        shape = batch, heads * ranks, tokens // ranks, dim
        return self._device.run_kernel([self._send({"o": output})], [shape], output.dtype)[0]

    def _send(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Encode tensors, and return the message that arrives."""
        size = sum(
            self._codes.row_bytes(name, each.shape[-1], each.element_size()) * each[..., 0].numel()
            for name, each in tensors.items()
        )
        [message] = self._device.run_kernel([*tensors.values()], [(size,)], torch.uint8)
        return wait(collectives.all_to_all_single(message, None, None, self._group))


def wait(in_flight: torch.Tensor) -> torch.Tensor:
    """Return the result of a functional collective once it has arrived."""
    return in_flight.wait() if isinstance(in_flight, collectives.AsyncCollectiveTensor) else in_flight
