"""The all-gather of K and V, coded on slow axes: each block crosses a slow link once.

A rank's block is encoded once for all of its receivers, which share one link reference with the sender. In a ring it
is decoded where it arrives and goes on along the fast axes, unchanged. A rank therefore has references of one block per
other coordinate on the slow axes, rather than of the whole ring.

Sizes in shapes: S coordinates on slow axes, F on fast axes; B batch, H heads, T tokens and D head dim of a block.
"""

from collections.abc import Iterable, Sequence

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
"""Blocks by rank in the mesh."""


def start(
    tensors: Sequence[torch.Tensor],
    mesh: Mesh,
    label: Label,
    head_group: HeadGroup,
    layer_codecs: LayerCodecs | None,
) -> list[Handle[Blocks]]:
    """Start an all-gather of this rank's tensors.

    Args:
        tensors: (B, H, T, D) each, of one dtype; they must not change until the handles have been waited for.
        mesh: mesh of all axes.
        label: letters of the tensors, and the layer's name.
        head_group: head group of the tensors.
        layer_codecs: codecs for slow axes; None to send everything unchanged.

    Returns:
        Handles that together return the blocks of all other ranks, those at the same slow coordinate first.
    """
    sizes, shapes = [tensor.numel() for tensor in tensors], [tensor.shape for tensor in tensors]
    block = torch.cat([tensor.flatten() for tensor in tensors])

    def to_blocks(values: torch.Tensor, ranks: Iterable[int]) -> Blocks:
        """Return values (ranks, n) as the tensors of each rank."""
        return {
            rank: tuple(part.view(shape) for part, shape in zip(row.split(sizes), shapes, strict=True))
            for rank, row in zip(ranks, values, strict=True)
        }

    partition = layer_codecs.partition if layer_codecs else None
    if layer_codecs is None or partition is None:
        ranks = range(mesh.topology.size)
        return [mesh.start(label, lambda: _gather(block, mesh), lambda values: to_blocks(values, ranks))]
    fast = partition.fast

    def gather_remote() -> torch.Tensor:
        """Return the blocks of all fast coordinates, and for each of them of all other slow ones, (F * (S - 1), n)."""
        blocks = block.new_empty(partition.num_slow, len(block))
        targets = [part.unflatten(1, shape) for part, shape in zip(blocks.split(sizes, 1), shapes, strict=True)]
        _gather_encoded(label.tensors, tensors, targets, partition, head_group, layer_codecs)
        remote = rows.remote_slots(blocks, _local_slots(partition))
        return _gather(remote, fast).flatten(0, 1) if fast else remote

    handles = []
    if fast:
        near = partition.ranks_by_slow_index[partition.slow_index]
        handles.append(fast.start(label, lambda: _gather(block, fast), lambda values: to_blocks(values, near)))
    by_fast_index = zip(*(partition.ranks_by_slow_index[index] for index in partition.remote_indices), strict=True)
    far = [rank for remote_ranks in by_fast_index for rank in remote_ranks]
    handles.append(partition.slow.start(label, gather_remote, lambda values: to_blocks(values, far)))
    return handles


def _gather(block: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return the blocks of all ranks of a mesh, (ranks, *block.shape)."""
    return mesh.all_gather(block, mesh.gather_plan(block.nbytes)).reshape(-1, *block.shape)


def gather_sequence(
    names: str,
    tensors: Sequence[torch.Tensor],
    partition: AxisPartition,
    head_group: HeadGroup,
    layer_codecs: LayerCodecs | None,
) -> list[torch.Tensor]:
    """Return tensors with the tokens of all coordinates on the slow axes; runs on the caller's stream.

    Args:
        names: a letter for each tensor.
        tensors: this rank's tensors (B, H, T, D), of one dtype.
        partition: slow and fast axes.
        head_group: head group of the tensors.
        layer_codecs: codecs of the layer; None to send the tensors unchanged.

    Returns:
        (B, H, S * T, D) each, contiguous.
    """
    num_slow = partition.num_slow
    wholes = [tensor.new_empty(*tensor.shape[:2], num_slow * tensor.shape[2], tensor.shape[3]) for tensor in tensors]
    targets = [whole.unflatten(2, (num_slow, -1)).movedim(2, 0) for whole in wholes]
    if layer_codecs is None:
        received = _gather(torch.cat([tensor.flatten() for tensor in tensors]), partition.slow)
        sizes = [tensor.numel() for tensor in tensors]
        for target, part in zip(targets, received.split(sizes, 1), strict=True):
            target.copy_(part.view(target.shape))
        return wholes
    for target, tensor in zip(targets, tensors, strict=True):
        target[partition.slow_index].copy_(tensor)
    _gather_encoded(names, tensors, targets, partition, head_group, layer_codecs)
    return wholes


def _gather_encoded(
    names: str,
    tensors: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    partition: AxisPartition,
    head_group: HeadGroup,
    layer_codecs: LayerCodecs,
) -> None:
    """Send tensors encoded along the slow axes, and decode those of other coordinates into targets (S, B, H, T, D)."""
    values, copies = [tensor[None] for tensor in tensors], partition.num_slow - 1
    message = Message(names, values, layer_codecs, head_group, _local_slots(partition), len(tensors[0]), copies)
    received = _gather(message.encode()[0], partition.slow)
    message.decode(received, targets, lambda sent: _gather(sent[0], partition.slow))


def _local_slots(partition: AxisPartition) -> range:
    """Return the slot of this rank's own coordinate."""
    return range(partition.slow_index, partition.slow_index + 1)
