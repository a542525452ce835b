"""Resharding of tensors between sequence and heads: the layout of messages, which `mesh` then sends.

Sizes in shapes: P ranks, B batch, S sequence, H heads, D head dim.
"""

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS, HeadGroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.packing import pack, unpack
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression import coded_all_to_all
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.topology.plans import Plan

HEADS, SEQUENCE = 1, 2
"""Dims of attention tensors, (B, H, S, D)."""

_LABEL = Label("any")


def pad_heads(tensor: torch.Tensor, multiple: int, dim: int = HEADS) -> torch.Tensor:
    """Return a tensor zero-padded to a multiple of heads.

    Args:
        tensor: shape (B, H, S, D), or other dims in front of D.
        multiple: number that must divide the padded number of heads.
        dim: dim of the heads.
    """
    missing = -tensor.shape[dim] % multiple
    return functional.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, missing)) if missing else tensor


def reshard(tensors: Sequence[torch.Tensor], scatter_dim: int, gather_dim: int, mesh: Mesh) -> list[torch.Tensor]:
    """Reshard tensors from one dim to another, all in one message, and wait for the result.

    Q, K and V go from (B, H, S/P, D) to (B, H/P, S, D) with scatter_dim 1 and gather_dim 2, O goes back with the dims
    exchanged. Each element is copied once into the message, once between two stages, and once out of it.

    Args:
        tensors: tensors of one dtype; sizes may differ, as in grouped-query attention.
        scatter_dim: dim to split over the ranks; its size must be divisible by P in every tensor.
        gather_dim: dim to gather.
        mesh: ranks and their topology.

    Returns:
        The resharded tensors, contiguous.
    """

    def work() -> list[torch.Tensor]:
        return reshard_here(tensors, scatter_dim, gather_dim, mesh)

    if torch.compiler.is_compiling():  # traced graphs have no comm stream and no timing
        return work()
    return mesh.start(_LABEL, work, list, is_blocking=True).wait()


def reshard_here(
    tensors: Sequence[torch.Tensor], scatter_dim: int, gather_dim: int, mesh: Mesh, head_group: HeadGroup = ALL_HEADS
) -> list[torch.Tensor]:
    """Reshard tensors as :func:`reshard` does, on the caller's stream and without timing.

    Args:
        tensors: tensors of one dtype; sizes may differ.
        scatter_dim: dim to split over the ranks.
        gather_dim: dim to gather.
        mesh: ranks and their topology.
        head_group: part of each rank's share of `scatter_dim` to send.
    """
    plan = mesh.policy.choose(_nbytes(tensors) // head_group.count)
    pieces = [_by_rank(tensor, scatter_dim, plan.shape, head_group) for tensor in tensors]
    return _merge(mesh.all_to_all(_pack(pieces, plan), plan), pieces, gather_dim, plan)


def start_seq_to_heads(
    tensors: Sequence[torch.Tensor],
    mesh: Mesh,
    label: Label,
    layer_codecs: LayerCodecs | None = None,
    is_blocking: bool = False,
) -> Handle[list[torch.Tensor]]:
    """Start to reshard a head group from (B, H, S/P, D) to (B, H/P/head_group.count, S, D), all in one message.

    Args:
        tensors: tensors of one dtype; they must not change before the handle has been waited for.
        mesh: ranks and their topology.
        label: a letter for each tensor, the layer, and the head group to send.
        layer_codecs: codecs for slow axes; lossless when not given.
        is_blocking: whether the caller waits right away and computes nothing meanwhile.

    Returns:
        A handle for the resharded tensors.
    """
    if layer_codecs:
        shape = layer_codecs.slow_and_fast.shape
        pieces = [_by_rank(tensor, HEADS, shape, label.head_group) for tensor in tensors]
        results, targets = _results(pieces, SEQUENCE, shape)
        return coded_all_to_all.start(pieces, targets, mesh, layer_codecs, label, results, is_blocking)
    plan = mesh.policy.choose(_nbytes(tensors) // label.head_group.count)
    pieces = [_by_rank(tensor, HEADS, plan.shape, label.head_group) for tensor in tensors]

    def merge(received: torch.Tensor) -> list[torch.Tensor]:
        return _merge(received, pieces, SEQUENCE, plan)

    return mesh.start_all_to_all(_pack(pieces, plan), plan, label, merge, is_blocking)


def start_heads_to_seq(
    tensor: torch.Tensor,
    target: torch.Tensor,
    mesh: Mesh,
    label: Label,
    layer_codecs: LayerCodecs | None = None,
    is_blocking: bool = False,
) -> Handle[None]:
    """Start to reshard a head group back into its part of `target`; see :func:`start_seq_to_heads`.

    Args:
        tensor: output of the head group, (B, H/P/head_group.count, S, D).
        target: shape (B, H, S/P, D), contiguous; written when the handle is waited for.
        mesh: ranks and their topology.
        label: letter of the tensor, the layer and the head group.
        layer_codecs: codecs for slow axes; lossless when not given.
        is_blocking: whether the caller waits right away and computes nothing meanwhile.
    """
    if layer_codecs:
        shape = layer_codecs.slow_and_fast.shape
        pieces, targets = [_by_rank(tensor, SEQUENCE, shape)], [_by_rank(target, HEADS, shape, label.head_group)]
        return coded_all_to_all.start(pieces, targets, mesh, layer_codecs, label, None, is_blocking)
    plan = mesh.policy.choose(_nbytes([tensor]))
    pieces = [_by_rank(tensor, SEQUENCE, plan.shape)]
    targets = [_by_rank(target, HEADS, plan.shape, label.head_group)]

    def write(received: torch.Tensor) -> None:
        _write(received, targets, plan)

    return mesh.start_all_to_all(_pack(pieces, plan), plan, label, write, is_blocking)


def _by_rank(tensor: torch.Tensor, dim: int, shape: tuple[int, ...], head_group: HeadGroup = ALL_HEADS) -> torch.Tensor:
    """View (..., P * n, ...) as (*shape, ..., n, ...), P the product of `shape`; of n, only a head group's part."""
    levels, size = len(shape), tensor.shape[dim] // math.prod(shape)
    split = tensor.view(*tensor.shape[:dim], *shape, size, *tensor.shape[dim + 1 :])
    if head_group.count > 1:
        split = head_group.of(split, dim + levels)
    return split.movedim([*range(dim, dim + levels)], [*range(levels)])


def _results(
    pieces: list[torch.Tensor], dim: int, shape: tuple[int, ...]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return new tensors for the pieces (*shape, ...) of all ranks, gathered along a dim, and views by source."""
    levels, size = len(shape), math.prod(shape)
    shapes = [piece.shape[levels:] for piece in pieces]
    results = [
        piece.new_empty(*sizes[:dim], size * sizes[dim], *sizes[dim + 1 :])
        for piece, sizes in zip(pieces, shapes, strict=True)
    ]
    return results, [_by_rank(result, dim, shape) for result in results]


def _pack(pieces: list[torch.Tensor], plan: Plan) -> torch.Tensor:
    """Copy pieces into one message (*plan.shape, payload), in the memory layout of the plan's first stage."""
    first = plan.dims[0]
    return pack([piece.movedim(first, 0) for piece in pieces], len(plan.shape)).movedim(0, first)


def _write(message: torch.Tensor, targets: list[torch.Tensor], plan: Plan) -> None:
    """Copy the tensors of a received message to targets (*plan.shape, ...)."""
    for target, part in zip(targets, unpack(message, targets, len(plan.shape)), strict=True):
        target.copy_(part)


def _merge(message: torch.Tensor, pieces: list[torch.Tensor], dim: int, plan: Plan) -> list[torch.Tensor]:
    """Return the tensors of a received message, gathered along a dim; `pieces` are those that this rank sent."""
    results, targets = _results(pieces, dim, plan.shape)
    _write(message, targets, plan)
    return results


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the size of all tensors in bytes, in a form that can be traced for symbolic sizes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
