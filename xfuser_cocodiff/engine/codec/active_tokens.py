"""Active tokens: those of a tensor that a step sends, chosen by score, and the mask that tells receivers which.

Sizes in shapes: those of codec.py.
"""

import functools

import torch

from xfuser_cocodiff.engine.codec import rows
from xfuser_cocodiff.engine.codec.codec import TOKEN_DIM, Codec
from xfuser_cocodiff.engine.codec.link_reference import LinkReference


class ActiveTokens:
    """The tokens of each group that are sent; every group sends the same number.

    Args:
        mask: uint8 (L, G, T or more); 1 marks a token that is sent.
        tokens: T.
        count: number of tokens sent per group.
    """

    def __init__(self, mask: torch.Tensor, tokens: int, count: int) -> None:
        self.mask, self.tokens, self.count = mask, tokens, count

    @functools.cached_property
    def indices(self) -> torch.Tensor:
        """Indices of the tokens that are sent, ascending. int64 (L, G, count); computed without a device sync."""
        mask = self.mask[..., : self.tokens]
        return mask.sort(dim=-1, descending=True, stable=True).indices[..., : self.count]

    def select(self, values: torch.Tensor) -> torch.Tensor:
        """Return the active tokens of values (L, G, H, T, D)."""
        return values.gather(TOKEN_DIM, self._index_of(values))

    def replace(self, values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return values (L, G, H, T, D) with their active tokens replaced."""
        return values.scatter(TOKEN_DIM, self._index_of(values), tokens)

    def _index_of(self, values: torch.Tensor) -> torch.Tensor:
        heads, dim = values.shape[2], values.shape[4]
        return self.indices[:, :, None, :, None].expand(-1, -1, heads, -1, dim)


def select_tokens(
    values: torch.Tensor,
    reference: LinkReference,
    codec: Codec,
    local_slots: range | None = None,
) -> ActiveTokens:
    """Return the active tokens of each group: those that have changed most since the last step, as in V-Major.

    Args:
        values: (P, G, H, T, D).
        reference: the sender's.
        codec: gives the number of tokens.
        local_slots: slots of this rank, which are skipped; None for none.
    """
    tokens = values.shape[TOKEN_DIM]
    values = rows.remote_slots(values, local_slots)
    last = reference.values if reference.last_values is None else reference.last_values
    scores = (values - last).abs().sum((2, 4), dtype=torch.float32)
    reference.last_values = values.clone(memory_format=torch.contiguous_format)
    count = codec.num_active(tokens)
    mask = torch.zeros(*scores.shape[:2], -(-tokens // 8) * 8, dtype=torch.uint8, device=scores.device)
    return ActiveTokens(mask.scatter_(-1, scores.topk(count, -1, sorted=False).indices, 1), tokens, count)


def pack_active(active: ActiveTokens, section: torch.Tensor, local_slots: range | None = None) -> None:
    """Write active tokens as one bit per token to a section uint8 (P, n), except for the local slots."""
    bits = active.mask.unflatten(-1, (-1, 8)) << _shifts(section.device)
    rows.write_remote_slots(section, bits.sum(-1, dtype=torch.uint8).flatten(1), local_slots)


def unpack_active(
    section: torch.Tensor, groups: int, tokens: int, count: int, local_slots: range | None = None
) -> ActiveTokens:
    """Read active tokens; the inverse of :func:`pack_active`, without a device sync.

    Args:
        section: uint8 (P, n).
        groups: G.
        tokens: T.
        count: number of active tokens per group.
        local_slots: slots of this rank, which are skipped; None for none.
    """
    packed = rows.remote_slots(section, local_slots).unflatten(1, (groups, -1, 1))
    return ActiveTokens((packed >> _shifts(section.device)).bitwise_and_(1).flatten(-2), tokens, count)


@functools.cache
def _shifts(device: torch.device) -> torch.Tensor:
    """Return the shifts of the bits of a byte, uint8 (8)."""
    return torch.arange(8, dtype=torch.uint8, device=device)
