"""The exchange: resharding tensors between sequence and heads. Layout here, movement in `collectives`.

Sizes in shapes: P ranks, B batch, S sequence, H heads, D head dim.
"""

import math
from collections.abc import Sequence

import torch

from xfuser_cocodiff.collectives import Mesh


def reshard(tensors: Sequence[torch.Tensor], scatter_dim: int, gather_dim: int, mesh: Mesh) -> list[torch.Tensor]:
    """Split one dim of each tensor over the ranks and collect another, all tensors in one message.

    Q, K and V go from (B, H, S/P, D) to (B, H/P, S, D) with scatter_dim 1 and gather_dim 2, O the other way round.
    Each element is copied once into the message, once between two phases, and once out of it.

    Args:
        tensors: of one dtype; sizes may differ, as for grouped-query attention.
        scatter_dim: dim to split; its size must be a multiple of the number of ranks in every tensor.
        gather_dim: dim to collect.
        mesh: ranks and their topology.

    Returns:
        The resharded tensors, contiguous.
    """
    pieces = [_by_destination(tensor, scatter_dim, mesh) for tensor in tensors]
    received = mesh.all_to_all(_pack(pieces, mesh))
    return [_merge(piece, gather_dim, mesh) for piece in _unpack(received, pieces, mesh)]


def _by_destination(tensor: torch.Tensor, scatter_dim: int, mesh: Mesh) -> torch.Tensor:
    """View (..., P * n, ...) as (*axes, ..., n, ...)."""
    shape = mesh.topology.shape
    split = tensor.unflatten(scatter_dim, (*shape, tensor.shape[scatter_dim] // mesh.topology.size))
    return split.movedim(_dims(scatter_dim, len(shape)), _dims(0, len(shape)))


def _pack(pieces: list[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """Copy pieces into one message (*axes, payload), laid out in memory as the first phase sends it."""
    levels, first = len(mesh.topology.axes), mesh.first_dim
    outermost = [piece.movedim(first, 0) for piece in pieces]
    sizes = _payload_sizes(pieces, levels)
    message = outermost[0].new_empty(*outermost[0].shape[:levels], sum(sizes))
    for piece, part in zip(outermost, message.split(sizes, -1), strict=True):
        part.unflatten(-1, piece.shape[levels:]).copy_(piece)
    return message.movedim(0, first)


def _unpack(message: torch.Tensor, pieces: list[torch.Tensor], mesh: Mesh) -> list[torch.Tensor]:
    levels = len(mesh.topology.axes)
    parts = message.split(_payload_sizes(pieces, levels), -1)
    return [part.unflatten(-1, piece.shape[levels:]) for part, piece in zip(parts, pieces, strict=True)]


def _payload_sizes(pieces: list[torch.Tensor], levels: int) -> list[int]:
    return [math.prod(piece.shape[levels:]) for piece in pieces]


def _merge(piece: torch.Tensor, gather_dim: int, mesh: Mesh) -> torch.Tensor:
    """Copy (*axes, ..., m, ...) into (..., P * m, ...)."""
    levels = len(mesh.topology.axes)
    ordered = piece.movedim(_dims(0, levels), _dims(gather_dim, levels))
    return ordered.flatten(gather_dim, gather_dim + levels).contiguous()


def _dims(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))
