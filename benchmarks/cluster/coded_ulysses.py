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
    overlaps: bool = False
    """Whether the all-to-all of one tensor runs while the next is encoded."""
    rotates: bool = False
    """Whether Q and K are multiplied by a Hadamard matrix before they are encoded, which leaves attention as it is."""
    gathers_statistics: str = ""
    """Letters whose codes use statistics of all tokens, which an all-gather collects before."""

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
        statistics = self._statistics(given)
        together = self._codes.one_message and len({each.shape for each in given.values()}) == 1
        in_flight, received = [], list[torch.Tensor]()
        for message in [given] if together else [{name: given[name]} for name in given]:
            known = [statistics[name] for name in message if name in statistics]
            in_flight.append((message, known, self._start(message, known)))
            if not self._codes.overlaps:
                received += self._finish_inputs(*in_flight.pop())
        for each in in_flight:
            received += self._finish_inputs(*each)
        return received

    def exchange_output(self, output: torch.Tensor) -> torch.Tensor:
        """Return O (B, h, S, D) as (B, H, S/P, D)."""
        message, ranks = wait(self._start({"o": output}, [])), self._group.size()
        batch, heads, tokens, dim = output.shape
        [decoded] = self._device.run_kernel([message], [(batch, heads * ranks, tokens // ranks, dim)], output.dtype)
        return decoded

    def _start(self, tensors: Mapping[str, torch.Tensor], statistics: Sequence[torch.Tensor]) -> torch.Tensor:
        """Encode tensors, and start the all-to-all of their message."""
        size = sum(
            self._codes.row_bytes(name, each.shape[-1], each.element_size()) * each[..., 0].numel()
            for name, each in tensors.items()
        )
        [message] = self._device.run_kernel([*tensors.values(), *statistics], [(size,)], torch.uint8)
        return collectives.all_to_all_single(message, None, None, self._group)

    def _finish_inputs(
        self, tensors: Mapping[str, torch.Tensor], statistics: Sequence[torch.Tensor], in_flight: torch.Tensor
    ) -> list[torch.Tensor]:
        ranks, message = self._group.size(), wait(in_flight)
        sizes = [each.shape for each in tensors.values()]
        shapes = [(batch, heads // ranks, tokens * ranks, dim) for batch, heads, tokens, dim in sizes]
        of_own_heads = [each[:, : each.shape[1] // ranks] for each in statistics]
        return self._device.run_kernel([message, *of_own_heads], shapes, next(iter(tensors.values())).dtype)

    def _statistics(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the statistics (B, H, 1, D) over all tokens of the tensors whose codes need them."""
        chosen = {name: each for name, each in tensors.items() if name in self._codes.gathers_statistics}
        together = len({each.shape for each in chosen.values()}) == 1
        gathered: dict[str, torch.Tensor] = {}
        for part in [chosen] if together else [{name: each} for name, each in chosen.items()]:
            shapes = [(*each.shape[:2], 1, each.shape[3]) for each in part.values()]
            [own] = self._device.run_kernel([*part.values()], [(len(part), *shapes[0])], torch.float32)
            everybody = wait(collectives.all_gather_single(own.flatten(), 0, self._group))
            gathered |= zip(part, self._device.run_kernel([everybody], shapes, torch.float32), strict=True)
        return gathered


def wait(in_flight: torch.Tensor) -> torch.Tensor:
    """Return the result of a functional collective once it has arrived."""
    return in_flight.wait() if isinstance(in_flight, collectives.AsyncCollectiveTensor) else in_flight
