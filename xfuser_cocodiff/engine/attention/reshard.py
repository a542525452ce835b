"""Resharding of tensors between sequence and heads: the layout of messages, which `mesh` then sends.

Sizes in shapes: P ranks, B batch, S sequence, H heads, D head dim.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS, HeadGroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression import coded_all_to_all
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.topology.plans import Plan

HEADS, SEQUENCE = 1, 2
"""Dims of attention tensors, (B, H, S, D)."""

_NO_LABEL = Label("any")


def pad_heads(tensor: torch.Tensor, multiple: int, dim: int = HEADS) -> torch.Tensor:
    """Return a tensor zero-padded to a multiple of heads.

    Args:
        tensor: shape (B, H, S, D), or other dims in front of D.
        multiple: number that must divide the padded number of heads.
        dim: dim of the heads.
    """
    missing = -tensor.shape[dim] % multiple
    return functional.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, missing)) if missing else tensor


def reshard(
    tensors: Sequence[torch.Tensor], scatter_dim: int, gather_dim: int, mesh: Mesh, label: Label = _NO_LABEL
) -> list[torch.Tensor]:
    """Reshard tensors from one dim to another, all in one message, and wait for the result.

    Q, K and V go from (B, H, S/P, D) to (B, H/P, S, D) with scatter_dim 1 and gather_dim 2, O goes back with the dims
    exchanged. Each element is copied once into the message, once between two stages, and once out of it.

    Args:
        tensors: tensors of one dtype; sizes may differ, as in grouped-query attention.
        scatter_dim: dim to split over the ranks; its size must be divisible by P in every tensor.
        gather_dim: dim to gather.
        mesh: ranks and their topology.
        label: tensors and layer, for traces.

    Returns:
        The resharded tensors, contiguous.
    """
    if torch.compiler.is_compiling():  # traced graphs have no comm stream and no timing
        return reshard_here(tensors, scatter_dim, gather_dim, mesh)
    message, plan, merge = _message(tensors, scatter_dim, gather_dim, mesh)
    span = mesh.traffic.span(label, tensors[0].device)
    with span.record_wait():
        received = mesh.comm_stream.run(lambda: mesh.timed_all_to_all(message, plan, span))
    return merge(received)


def reshard_here(
    tensors: Sequence[torch.Tensor],
    scatter_dim: int,
    gather_dim: int,
    mesh: Mesh,
    head_group: HeadGroup = ALL_HEADS,
    has_own_storage: bool = False,
) -> list[torch.Tensor]:
    """Reshard tensors as :func:`reshard` does, on the caller's stream, even if others are in flight.

    Args:
        tensors: tensors of one dtype; sizes may differ.
        scatter_dim: dim to split over the ranks.
        gather_dim: dim to gather.
        mesh: ranks and their topology.
        head_group: part of each rank's share of `scatter_dim` to send.
        has_own_storage: whether each result needs a storage of its own.
    """
    message, plan, merge = _message(tensors, scatter_dim, gather_dim, mesh, head_group, has_own_storage)
    return merge(mesh.all_to_all(message, plan))


def start_seq_to_heads(
    tensors: Sequence[torch.Tensor],
    mesh: Mesh,
    label: Label,
    head_group: HeadGroup = ALL_HEADS,
    layer_codecs: LayerCodecs | None = None,
    is_blocking: bool = False,
    has_own_storage: bool = False,
) -> Handle[list[torch.Tensor]]:
    """Start to reshard tensors from (B, H, S/P, D) to (B, H/P/head_group.count, S, D), all in one message.

    Args:
        tensors: tensors of one dtype; they must not change before the handle has been waited for.
        mesh: ranks and their topology.
        label: tensors and layer; with codecs, it needs one letter per tensor.
        head_group: part of each rank's heads to send.
        layer_codecs: codecs for slow axes; lossless when not given.
        is_blocking: whether the caller waits right away and computes nothing meanwhile.
        has_own_storage: whether each result needs a storage of its own, as outputs of a custom operator do.

    Returns:
        A handle for the resharded tensors.
    """
    if layer_codecs:
        plan = mesh.hierarchical_plan
        pieces = [_by_destination(tensor, HEADS, plan, head_group) for tensor in tensors]
        heads = [piece.shape[len(plan.shape) + HEADS] for piece in pieces]
        results = [
            tensor.new_empty(len(tensor), count, plan.topology.size * tensor.shape[SEQUENCE], tensor.shape[-1])
            for tensor, count in zip(tensors, heads, strict=True)
        ]
        targets = [_by_destination(result, SEQUENCE, plan, ALL_HEADS) for result in results]
        return coded_all_to_all.start(pieces, targets, mesh, layer_codecs, label, head_group, results, is_blocking)
    message, plan, merge = _message(tensors, HEADS, SEQUENCE, mesh, head_group, has_own_storage)
    return mesh.start_all_to_all(message, plan, label, merge, is_blocking)


def start_heads_to_seq(
    tensor: torch.Tensor,
    target: torch.Tensor,
    mesh: Mesh,
    label: Label,
    head_group: HeadGroup,
    layer_codecs: LayerCodecs | None = None,
    is_blocking: bool = False,
    on_stream: bool = False,
) -> Handle[None]:
    """Start to reshard a head group from (B, H/P/head_group.count, S, D) back into its part of `target`.

    Args:
        tensor: output of the head group; it must not change before the handle has been waited for.
        target: shape (B, H, S/P, D), contiguous; written when the handle is waited for.
        mesh: ranks and their topology.
        label: tensor and layer.
        head_group: head group of the tensor.
        layer_codecs: codecs for slow axes; lossless when not given.
        is_blocking: whether the caller waits right away and computes nothing meanwhile.
        on_stream: whether other collectives of the mesh are started by operations on its comm stream, so that this one
            has to keep their order.

    Returns:
        A handle without a result.
    """
    plan = mesh.hierarchical_plan if layer_codecs else mesh.policy.plan_for(_nbytes([tensor]))
    piece = _by_destination(tensor, SEQUENCE, plan, ALL_HEADS)
    destination = _by_destination(target, HEADS, plan, head_group)
    if layer_codecs:
        return coded_all_to_all.start([piece], [destination], mesh, layer_codecs, label, head_group, None, is_blocking)
    message = _pack([piece], plan)

    def copy_to_target(received: torch.Tensor) -> None:
        destination.copy_(_unpack(received, [piece], plan)[0])

    if on_stream:
        return mesh.start(label, lambda: mesh.all_to_all(message, plan), copy_to_target, is_blocking)
    return mesh.start_all_to_all(message, plan, label, copy_to_target, is_blocking)


def _message(
    tensors: Sequence[torch.Tensor],
    scatter_dim: int,
    gather_dim: int,
    mesh: Mesh,
    head_group: HeadGroup = ALL_HEADS,
    has_own_storage: bool = False,
) -> tuple[torch.Tensor, Plan, Callable[[torch.Tensor], list[torch.Tensor]]]:
    """Return a lossless message of tensors, its plan, and the function that returns what arrives by tensor."""
    plan = mesh.policy.plan_for(_nbytes(tensors) // head_group.count)
    pieces = [_by_destination(tensor, scatter_dim, plan, head_group) for tensor in tensors]
    return _pack(pieces, plan), plan, lambda received: _merge_all(received, pieces, gather_dim, plan, has_own_storage)


def _split(tensor: torch.Tensor, dim: int, plan: Plan) -> torch.Tensor:
    """View (..., P * n, ...) as (..., *plan.shape, n, ...)."""
    sizes = tensor.shape
    return tensor.view(*sizes[:dim], *plan.shape, sizes[dim] // plan.topology.size, *sizes[dim + 1 :])


def _by_destination(tensor: torch.Tensor, scatter_dim: int, plan: Plan, head_group: HeadGroup) -> torch.Tensor:
    """View (..., P * n, ...) as (*plan.shape, ..., n, ...); of n, only the part of the head group."""
    split, levels = _split(tensor, scatter_dim, plan), len(plan.shape)
    if head_group.count > 1:
        split = head_group.of(split, scatter_dim + levels)
    return split.permute(_move_dims(split.ndim, scatter_dim, 0, levels))


def _pack(pieces: list[torch.Tensor], plan: Plan) -> torch.Tensor:
    """Copy pieces into one message (*plan.shape, payload), in the memory layout of the plan's first stage."""
    levels, first = len(plan.shape), plan.dims[0]
    outermost = [piece.movedim(first, 0) for piece in pieces] if first else pieces
    if len(pieces) == 1 and outermost[0].is_contiguous():
        message = outermost[0].view(*outermost[0].shape[:levels], -1)
    elif _have_one_shape(pieces):
        message = torch.stack(outermost, levels).flatten(levels)  # one call on the host for all tensors
    else:
        sizes = _payload_sizes(pieces, levels)
        message = outermost[0].new_empty(*outermost[0].shape[:levels], sum(sizes))
        for piece, part in zip(outermost, message.split(sizes, -1), strict=True):
            part.unflatten(-1, piece.shape[levels:]).copy_(piece)
    return message.movedim(0, first) if first else message


def _unpack(message: torch.Tensor, pieces: list[torch.Tensor], plan: Plan) -> list[torch.Tensor]:
    """View a message as pieces of the given shapes; the inverse of :func:`_pack`."""
    levels = len(plan.shape)
    parts = message.split(_payload_sizes(pieces, levels), -1) if len(pieces) > 1 else (message,)
    return [part.unflatten(-1, piece.shape[levels:]) for part, piece in zip(parts, pieces, strict=True)]


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the size of all tensors in bytes, in a form that can be traced for symbolic sizes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _payload_sizes(pieces: list[torch.Tensor], levels: int) -> list[int]:
    return [math.prod(piece.shape[levels:]) for piece in pieces]


def _have_one_shape(pieces: list[torch.Tensor]) -> bool:
    """Return whether there are several pieces, all of the same shape."""
    return len(pieces) > 1 and all(piece.shape == pieces[0].shape for piece in pieces)


def _merge_all(
    message: torch.Tensor, pieces: list[torch.Tensor], gather_dim: int, plan: Plan, has_own_storage: bool = False
) -> list[torch.Tensor]:
    """Copy a message into the resharded tensors of all pieces; those of one shape in one call, as views of a stack."""
    if has_own_storage or not _have_one_shape(pieces):
        return [_merge(piece, gather_dim, plan) for piece in _unpack(message, pieces, plan)]
    levels = len(plan.shape)
    stacked = message.unflatten(-1, (len(pieces), *pieces[0].shape[levels:])).movedim(levels, 0)
    return list(_merge(stacked, gather_dim + 1, plan, 1).unbind())


def _merge(piece: torch.Tensor, gather_dim: int, plan: Plan, first_dim: int = 0) -> torch.Tensor:
    """Copy (*plan.shape, ..., m, ...) into (..., P * m, ...); the dims of the plan begin at `first_dim`."""
    levels = len(plan.shape)
    ordered = piece.permute(_move_dims(piece.ndim, first_dim, gather_dim, levels))
    return ordered.contiguous().flatten(gather_dim, gather_dim + levels)


@functools.cache
def _move_dims(ndim: int, source: int, target: int, count: int) -> tuple[int, ...]:
    """Return the permutation that moves `count` adjacent dims."""
    moving = range(source, source + count)
    order = [dim for dim in range(ndim) if dim not in moving]
    return (*order[:target], *moving, *order[target:])
