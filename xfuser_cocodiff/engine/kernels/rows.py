"""What kernels are given and what they return: tokens that are sent, payloads, and places on slow axes.

Sizes in shapes: see the package.
"""

import functools
from typing import NamedTuple

import torch


class ActiveTokens:
    """The tokens of each group that are sent, of each as many; either set of kernels has them as it needs them.

    Args:
        mask: uint8 (L, G, at least T), 1 for those that are sent.
        tokens: T.
        count: of each group.
    """

    def __init__(self, mask: torch.Tensor, tokens: int, count: int) -> None:
        self.mask, self.tokens, self.count = mask, tokens, count

    @functools.cached_property
    def numbers(self) -> torch.Tensor:
        """Of each token among those that are sent, from 1; 0 stands for one that is not. int32 (L, G, T)."""
        mask = self.mask[..., : self.tokens]
        return mask.cumsum(-1, dtype=torch.int32).mul_(mask)

    @functools.cached_property
    def indices(self) -> torch.Tensor:
        """Of those that are sent, ascending, int64 (L, G, count); found without that the host waits for a device."""
        mask = self.mask[..., : self.tokens]
        return mask.sort(dim=-1, descending=True, stable=True).indices[..., : self.count]


class Prediction(NamedTuple):
    """What both ends of links know before values are sent."""

    held: torch.Tensor
    """(L, G, H, T, D), contiguous."""
    before: torch.Tensor | None = None
    """As `held`: what was held before that; None where nothing is extrapolated."""
    shares: torch.Tensor | None = None
    """How many parts of SHARES of the change between them are expected again on each link, uint8 (L)."""


SHARES = 32
"""Of a change, in which it is counted how much of it comes again: from nothing to all."""
TOLD = 8
"""Bytes behind the values of a payload where a sender tells its share, in the first: as many as leave values where they
can be read."""
_SAMPLE = 64


def sampled(tokens: int) -> int:
    """By every which token of so many it is judged how much of a change comes again."""
    return max(1, tokens // _SAMPLE)


class Encoded(NamedTuple):
    """What came of values."""

    held: torch.Tensor
    """What the receiver makes of them, (L, G, H, T, D)."""
    lacking: torch.Tensor | None = None
    """Sum of squares of what it lacks; not finite where the values are not. None where all are sent as they are."""
    wanted: torch.Tensor | None = None
    """Sum of squares of the values."""
    again: torch.Tensor | None = None
    """How much of the last change came again on each link, uint8 (L), see SHARES; None where that is not known."""


def others(places: int, here: range | None) -> int:
    """How many places are not the rank's own."""
    return places - len(here or ())


def away(values: torch.Tensor, here: range | None) -> torch.Tensor:
    """Values of all places but `here`: a view where they follow each other, else a copy."""
    if here is None:
        return values
    before, after = values[: here.start], values[here.stop :]
    return torch.cat([before, after]) if len(before) and len(after) else before if len(before) else after


def typed(payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes (P, n) as values, in their place."""
    # No token may be active, and then rows are nowhere in particular.
    return payload.view(dtype) if payload.shape[1] else payload.new_empty(payload.shape, dtype=dtype)


def put_away(target: torch.Tensor, values: torch.Tensor, here: range | None) -> None:
    """The inverse of :func:`away`: write values to all places but `here`."""
    if here is None:
        target.copy_(values)
        return
    if here.start > 0:
        target[: here.start].copy_(values[: here.start])
    if here.start < len(values):
        target[here.stop :].copy_(values[here.start :])
