"""Several tensors as one message.

The first `levels` dims of a message index ranks, as those of its tensors do; one more dim has the values.
"""

import math
from collections.abc import Sequence

import torch


def pack(tensors: Sequence[torch.Tensor], levels: int) -> torch.Tensor:
    """Return tensors (*ranks, ...) of one dtype as one message (*ranks, payload), with as few copies as possible."""
    first = tensors[0]
    if len(tensors) == 1 and first.is_contiguous():
        return first.view(*first.shape[:levels], -1)
    if len(tensors) > 1 and all(tensor.shape == first.shape for tensor in tensors):
        return torch.stack(tuple(tensors), levels).flatten(levels)  # one call on the host for all tensors
    sizes = _payload_sizes(tensors, levels)
    message = first.new_empty(*first.shape[:levels], sum(sizes))
    for tensor, part in zip(tensors, message.split(sizes, -1), strict=True):
        part.unflatten(-1, tensor.shape[levels:]).copy_(tensor)
    return message


def unpack(message: torch.Tensor, like: Sequence[torch.Tensor], levels: int) -> list[torch.Tensor]:
    """Return a message's tensors, shaped as `like`, as views: the inverse of :func:`pack`.

    The message may index ranks by other dims than `like`.
    """
    message = message.reshape(*like[0].shape[:levels], -1)
    parts = message.split(_payload_sizes(like, levels), -1) if len(like) > 1 else (message,)
    return [part.unflatten(-1, each.shape[levels:]) for part, each in zip(parts, like, strict=True)]


def _payload_sizes(tensors: Sequence[torch.Tensor], levels: int) -> list[int]:
    return [math.prod(tensor.shape[levels:]) for tensor in tensors]
