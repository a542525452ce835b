"""The exchange: resharding tensors between sequence and heads. Layout here, movement in `collectives`.

Sizes in shapes: P ranks, B batch, S sequence, H heads, D head dim.
"""

import functools
import math
from collections.abc import Sequence

import torch

from xfuser_cocodiff.collectives import Mesh
from xfuser_cocodiff.plan import Plan


def reshard(tensors: Sequence[torch.Tensor], scatter_dim: int, gather_dim: int, mesh: Mesh) -> list[torch.Tensor]:
    """Split one dim of each tensor over the ranks and collect another, all tensors in one message.

    Q, K and V go from (B, H, S/P, D) to (B, H/P, S, D) with scatter_dim 1 and gather_dim 2, O the other way round.
    Each element is copied once into the message, once between two stages, and once out of it.

    Args:
        tensors: of one dtype; sizes may differ, as for grouped-query attention.
        scatter_dim: dim to split; its size must be a multiple of the number of ranks in every tensor.
        gather_dim: dim to collect.
        mesh: ranks and their topology.

    Returns:
        The resharded tensors, contiguous.
    """
    plan = mesh.choose(sum(tensor.nbytes for tensor in tensors))
    pieces = [_by_destination(tensor, scatter_dim, plan) for tensor in tensors]
    received = mesh.all_to_all(_pack(pieces, plan), plan)
    return [_merge(piece, gather_dim, plan) for piece in _unpack(received, pieces, plan)]


def _by_destination(tensor: torch.Tensor, scatter_dim: int, plan: Plan) -> torch.Tensor:
    """View (..., P * n, ...) as (*plan.shape, ..., n, ...)."""
    sizes, levels = tensor.shape, len(plan.shape)
    rest = sizes[scatter_dim] // plan.topology.size
    split = tensor.view(*sizes[:scatter_dim], *plan.shape, rest, *sizes[scatter_dim + 1 :])
    return split.permute(_moved(split.ndim, scatter_dim, 0, levels))


def _pack(pieces: list[torch.Tensor], plan: Plan) -> torch.Tensor:
    """Copy pieces into one message (*plan.shape, payload), laid out in memory as the plan's first stage sends it."""
    levels, first = len(plan.shape), plan.dims[0]
    outermost = [piece.movedim(first, 0) for piece in pieces] if first else pieces
    lead = outermost[0].shape[:levels]
    if len(pieces) == 1:
        message = outermost[0].contiguous().view(*lead, -1)
    else:
        sizes = _payload_sizes(pieces, levels)
        message = outermost[0].new_empty(*lead, sum(sizes))
        for piece, part in zip(outermost, message.split(sizes, -1), strict=True):
            part.unflatten(-1, piece.shape[levels:]).copy_(piece)
    return message.movedim(0, first) if first else message


def _unpack(message: torch.Tensor, pieces: list[torch.Tensor], plan: Plan) -> list[torch.Tensor]:
    levels = len(plan.shape)
    parts = message.split(_payload_sizes(pieces, levels), -1) if len(pieces) > 1 else (message,)
    return [part.unflatten(-1, piece.shape[levels:]) for part, piece in zip(parts, pieces, strict=True)]


def _payload_sizes(pieces: list[torch.Tensor], levels: int) -> list[int]:
    return [math.prod(piece.shape[levels:]) for piece in pieces]


def _merge(piece: torch.Tensor, gather_dim: int, plan: Plan) -> torch.Tensor:
    """Copy (*plan.shape, ..., m, ...) into (..., P * m, ...)."""
    levels = len(plan.shape)
    ordered = piece.permute(_moved(piece.ndim, 0, gather_dim, levels))
    return ordered.flatten(gather_dim, gather_dim + levels).contiguous()


@functools.cache
def _moved(ndim: int, source: int, target: int, count: int) -> tuple[int, ...]:
    """The permutation that moves `count` neighbouring dims."""
    moving = range(source, source + count)
    order = [dim for dim in range(ndim) if dim not in moving]
    return (*order[:target], *moving, *order[target:])
