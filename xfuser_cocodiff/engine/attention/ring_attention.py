"""Ring attention over all-gathers of K and V: a rank attends to the blocks it has while others are in flight.

Partial outputs are merged by their log-sum-exp, with the arithmetic of PyTorch's ring, which xDiT runs; in lossless
mode in its order too, so that results are bit-identical to it.

Sizes in shapes: B batch, H heads, S queries, T keys of a block, D head dim.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS, HeadGroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.coded_all_gather import gather_blocks
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs

PartialOutput = tuple[torch.Tensor, torch.Tensor]
"""O (B, H, S, D) of one block and its log-sum-exp (B, H, S) or (B, H, S, 1)."""
AttendBlock = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int], PartialOutput]
"""Attention to one block: Q (B, H, S, D), K and V (B, H, T, D), the number of blocks before it, and its rank."""


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
        """Ranks in the order of PyTorch's ring: this rank, then its predecessors."""
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
    label = Label("kv", layer, head_group)
    gathers = _gathers([key, value], ring, label, layer_codecs)
    handles = [ring.mesh.start(label, work, list) for _, work in gathers]

    def arriving() -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for handle, (ranks, _) in zip(handles, gathers, strict=True):
            keys, values = (dict(zip(ranks, _by_rank(blocks), strict=True)) for blocks in handle.wait())
            yield from ((rank, keys[rank], values[rank]) for rank in ring.order[1:] if rank in keys)

    try:
        own = attend(query, key, value, 0, ring.rank)
        merged = _merge(None, *own)
        for step, (rank, *block) in enumerate(arriving(), 1):
            merged = _merge(merged, *attend(query, block[0], block[1], step, rank))
    finally:  # after an error, peers still wait for their messages
        for handle in handles:
            handle.drain()
    return merged[0].to(own[0].dtype)


def _gathers(
    tensors: Sequence[torch.Tensor], ring: Ring, label: Label, layer_codecs: LayerCodecs | None
) -> list[tuple[Sequence[int], Callable[[], list[torch.Tensor]]]]:
    """Return the all-gathers of K and V: the ranks in the order of their blocks, and the operation.

    Lossless, there is one. With codecs, the first returns the blocks of this rank's slow coordinate; the second decodes
    those of other slow coordinates and gathers them along the fast axes, unencoded.
    """
    partition = layer_codecs.partition if layer_codecs else None
    if partition is None:
        return [(range(ring.mesh.topology.size), lambda: gather_blocks(tensors, ring.mesh, label))]
    fast, remote = partition.fast, partition.remote_indices

    def gather_remote() -> list[torch.Tensor]:
        coded = gather_blocks(tensors, partition.slow, label, layer_codecs)
        arrived = [torch.stack([blocks[index] for index in remote]) for blocks in coded]
        return gather_blocks(arrived, fast, label) if fast else arrived

    far = [partition.ranks_at(index)[fast_index] for fast_index in range(partition.num_fast) for index in remote]
    near = partition.ranks_at(partition.slow_index)
    of_near = [(near, lambda: gather_blocks(tensors, fast, label))] if fast else []
    return [*of_near, (far, gather_remote)]


def _by_rank(blocks: torch.Tensor) -> list[torch.Tensor]:
    """Return blocks (B, H, T, D), which one or two outer dims index, without copies."""
    return [block for outer in blocks for block in (outer if outer.ndim > 4 else [outer])]


def _merge(merged: PartialOutput | None, output: torch.Tensor, lse: torch.Tensor) -> PartialOutput:
    """Return partial outputs merged with one more, in float32."""
    output, lse = output.float(), lse.float()
    lse = lse if lse.ndim == output.ndim else lse.unsqueeze(-1)
    if merged is None:
        return output, lse
    before, before_lse = merged
    return (
        before - functional.sigmoid(lse - before_lse) * (before - output),
        before_lse - functional.logsigmoid(before_lse - lse),
    )
