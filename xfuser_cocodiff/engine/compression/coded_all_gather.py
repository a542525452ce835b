"""The gather by codecs: K and V of every rank of a ring come to all others, and each block crosses a slow link once.

A rank's block goes along the slow axes first, encoded: once, for all who get it there, against one reference, of which
each of them holds the same. Where it arrives it is decoded, and goes on along the fast axes, as it is. So a rank holds
references of the blocks of as many ranks as there are other places on slow axes, and not of the whole ring.

Sizes in shapes: S places on slow axes, F on fast ones; B batch, H heads, T tokens and D head dim of a block.
"""

import math
from collections.abc import Sequence

import torch

from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.message import Message
from xfuser_cocodiff.engine.kernels import rows

Block = tuple[torch.Tensor, ...]
"""Tensors (B, H, T, D) of a rank."""
Blocks = dict[int, Block]
"""By the ranks' numbers in the mesh."""


def start(
    tensors: Sequence[torch.Tensor],
    mesh: Mesh,
    label: Label,
    head_group: HeadGroup,
    layer_codecs: LayerCodecs | None,
) -> list[Handle[Blocks]]:
    """Start to bring tensors of this rank to all others, and theirs here.

    Args:
        tensors: (B, H, T, D) each, of one dtype; they must not change before the handles were waited for.
        mesh: over all axes.
        label: what it is: a letter for each tensor.
        head_group: of the heads.
        layer_codecs: what travels on slow axes; everything, as it is, when not given.

    Returns:
        One for each part of what comes, those that are near first; together they bring all blocks but this rank's own.
    """
    shapes = [tensor.shape for tensor in tensors]
    block = torch.cat([tensor.flatten() for tensor in tensors])
    partition = layer_codecs.partition if layer_codecs else None
    if layer_codecs is None or partition is None:
        everyone = range(mesh.topology.size)
        return [mesh.start(label, lambda: _along(block, mesh), lambda values: _blocks(values, everyone, shapes))]
    near, fast = partition.ranks_by_slow_index[partition.slow_index], partition.fast
    found = (
        [fast.start(label, lambda: _along(block, fast), lambda values: _blocks(values, near, shapes))] if fast else []
    )
    return [*found, _far(tensors, shapes, partition, label, head_group, layer_codecs)]


def _along(block: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """What each rank of a mesh holds, (ranks, *block.shape)."""
    return mesh.all_gather(block, mesh.gather_plan(block.nbytes)).reshape(-1, *block.shape)


def _blocks(values: torch.Tensor, ranks: Sequence[int], shapes: list[torch.Size]) -> Blocks:
    """Values (ranks, n) as tensors of each rank."""
    sizes = [math.prod(shape) for shape in shapes]
    return {
        rank: tuple(part.view(shape) for part, shape in zip(own.split(sizes), shapes, strict=True))
        for rank, own in zip(ranks, values, strict=True)
    }


def _far(
    tensors: Sequence[torch.Tensor],
    shapes: list[torch.Size],
    partition: AxisPartition,
    label: Label,
    head_group: HeadGroup,
    layer_codecs: LayerCodecs,
) -> Handle[Blocks]:
    """Of the ranks at other places on the slow axes: of those that this one meets there it gets what was encoded."""
    ranks, sizes = (
        [partition.ranks_by_slow_index[place] for place in partition.remote_indices],
        [tensor.numel() for tensor in tensors],
    )

    def travel() -> torch.Tensor:
        """(F, S - 1, n), of which F is 1 where all axes are slow."""
        values, here = [tensor[None] for tensor in tensors], range(partition.slow_index, partition.slow_index + 1)
        message = Message(label.tensors, values, layer_codecs, head_group, here, copies=partition.num_slow - 1)
        received = _along(message.encoded()[0], partition.slow)
        blocks = tensors[0].new_empty(partition.num_slow, sum(sizes))
        landings = [part.unflatten(1, shape) for part, shape in zip(blocks.split(sizes, 1), shapes, strict=True)]
        message.decode(received, landings, lambda sent: _along(sent[0], partition.slow))
        arrived = rows.away(blocks, here)
        return _along(arrived, partition.fast) if partition.fast else arrived[None]

    def finish(found: torch.Tensor) -> Blocks:
        blocks: Blocks = {}
        for values, own in zip(found.transpose(0, 1), ranks, strict=True):
            blocks |= _blocks(values, own, shapes)
        return blocks

    return partition.slow.start(label, travel, finish)
