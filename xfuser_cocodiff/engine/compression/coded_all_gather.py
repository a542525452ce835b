"""The all-gather of K and V along the sequence, which may be coded on slow axes.

With codecs, a rank's block is encoded once for all of its receivers, which share one link reference with the sender. A
rank therefore has references of one block for each other coordinate on the slow axes.

Sizes in shapes: N ranks of a mesh; B batch, H heads, T tokens and D head dim of a rank's block.
"""

from collections.abc import Sequence

import torch

from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.packing import pack, unpack
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.message import Message


def gather(
    tensors: Sequence[torch.Tensor],
    mesh: Mesh,
    label: Label,
    layer_codecs: LayerCodecs | None = None,
) -> list[torch.Tensor]:
    """Gather tensors along the sequence, in the order of ranks, on the caller's stream.

    Args:
        tensors: this rank's tensors (B, H, T, D), of one dtype.
        mesh: ranks to gather from; with codecs, the mesh of the slow axes.
        label: a letter for each tensor, and their head group.
        layer_codecs: codecs of the layer; None to send the tensors unchanged.

    Returns:
        (B, H, N * T, D) each, contiguous.
    """
    size = mesh.topology.size
    wholes = [tensor.new_empty(*tensor.shape[:2], size * tensor.shape[2], tensor.shape[3]) for tensor in tensors]
    targets = [whole.unflatten(2, (size, -1)).movedim(2, 0) for whole in wholes]
    for target, blocks in zip(targets, gather_blocks(tensors, mesh, label, layer_codecs, targets), strict=True):
        if blocks is not target:
            target.copy_(blocks)
    return wholes


def gather_blocks(
    tensors: Sequence[torch.Tensor],
    mesh: Mesh,
    label: Label,
    layer_codecs: LayerCodecs | None = None,
    buffers: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Gather tensors as blocks, on the caller's stream. See :func:`gather` for the arguments.

    Args:
        buffers: where to decode each tensor, (N, B, H, T, D); allocated when not given. Unused without codecs.

    Returns:
        (N, B, H, T, D) each; without codecs, views of the received message.
    """
    size = mesh.topology.size
    partition = layer_codecs.partition if layer_codecs else None
    if layer_codecs is None or partition is None:
        return unpack(_gather(pack(tensors, 0), mesh), [tensor.expand(size, *tensor.shape) for tensor in tensors], 1)
    tensors = [tensor.detach() for tensor in tensors]
    buffers = buffers or [tensor.new_empty(size, *tensor.shape) for tensor in tensors]
    own = partition.slow_index
    for buffer, tensor in zip(buffers, tensors, strict=True):
        buffer[own].copy_(tensor)
    values = [tensor[None] for tensor in tensors]
    message = Message(label, values, layer_codecs, range(own, own + 1), copies=size - 1)
    received = _gather(message.encode()[0], mesh)
    message.decode(received, buffers, lambda sent: _gather(sent[0], mesh))
    return list(buffers)


def _gather(block: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return the one-dimensional blocks of all ranks of a mesh, (N, n)."""
    return mesh.all_gather(block, mesh.gather_plan(block.nbytes)).reshape(-1, len(block))
