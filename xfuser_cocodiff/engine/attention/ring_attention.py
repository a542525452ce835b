"""Ring attention over an all-gather: each block of K and V is attended to as soon as it arrives.

Partial outputs are merged by their log-sum-exp, in the order and with the arithmetic of PyTorch's ring, which xDiT
runs, so that results are bit-identical to it.

Sizes in shapes: P ranks of the ring; B batch, H heads, S queries, T keys of a block, D head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS, HeadGroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression import coded_all_gather
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.coded_all_gather import Block, Blocks
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs

PartialOutput = tuple[torch.Tensor, torch.Tensor]
"""O (B, H, S, D) of one block and its log-sum-exp (B, H, S) or (B, H, S, 1)."""
AttendBlock = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], PartialOutput]
"""Attention to one block: Q (B, H, S, D), K and V (B, H, T, D), and the position of the block in the merge order."""


@dataclass(frozen=True)
class Ring:
    """The ranks of a ring, as one of them sees them."""

    mesh: Mesh
    rank: int
    """Rank of this process in the ring."""
    partition: AxisPartition | None = None
    """Slow and fast axes of the ring; None in lossless mode."""

    @property
    def order(self) -> list[int]:
        """Ranks in the order in which their blocks are merged: this rank, then its predecessors."""
        size = self.mesh.topology.size
        return [(self.rank - distance) % size for distance in range(size)]


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attend: AttendBlock,
    ring: Ring,
    layer: str = "",
    head_group: HeadGroup = ALL_HEADS,
    layer_codecs: LayerCodecs | None = None,
) -> torch.Tensor:
    """Attend to the K and V of all ranks of a ring.

    Args:
        query: shape (B, H, S, D).
        key: K of this rank, shape (B, h, T, D); the same shape on every rank.
        value: V of this rank, shaped as `key`.
        attend: attention function for one block.
        ring: the ranks.
        layer: name of the layer in traces.
        head_group: head group that the tensors belong to.
        layer_codecs: codecs for slow axes; lossless when not given.

    Returns:
        O, shape (B, H, S, D).
    """
    handles = coded_all_gather.start([key, value], ring.mesh, Label("kv", layer), head_group, layer_codecs)
    merger = _BlockMerger(ring.order, lambda block, position: attend(query, block[0], block[1], position))
    try:
        merger.add({ring.rank: (key, value)})
        for handle in handles:
            merger.add(handle.wait())
    finally:  # after an error, peers still wait for their messages
        for handle in handles:
            handle.drain()
    return merger.output


class _BlockMerger:
    """Running merge of partial outputs, in a fixed order, whatever the order in which blocks arrive."""

    def __init__(self, order: list[int], attend: Callable[[Block, int], PartialOutput]) -> None:
        self._order, self._attend, self._num_merged = order, attend, 0
        self._pending: dict[int, PartialOutput] = {}
        """Partial outputs that wait for blocks before them, by position."""
        self._merged: PartialOutput

    def add(self, blocks: Blocks) -> None:
        """Attend to blocks that arrived and merge what is next in order; blocks merged before are ignored."""
        for position in sorted(map(self._order.index, blocks)):
            if position >= self._num_merged:
                self._pending[position] = self._attend(blocks[self._order[position]], position)
            while self._num_merged in self._pending:  # merged as early as possible, to hold few partial outputs
                self._merge(*self._pending.pop(self._num_merged))
                self._num_merged += 1

    def _merge(self, output: torch.Tensor, lse: torch.Tensor) -> None:
        self._dtype = output.dtype
        output, lse = output.float(), lse.float()
        lse = lse if lse.ndim == output.ndim else lse.unsqueeze(-1)
        if self._num_merged == 0:
            self._merged = output, lse
            return
        before, before_lse = self._merged
        self._merged = (
            before - functional.sigmoid(lse - before_lse) * (before - output),
            before_lse - functional.logsigmoid(before_lse - lse),
        )

    @property
    def output(self) -> torch.Tensor:
        """Merged output, in the dtype of the partial outputs."""
        return self._merged[0].to(self._dtype)
