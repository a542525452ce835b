"""Active tokens: those of a tensor that a step sends, chosen by score, and the mask that tells receivers which.

Sizes in shapes: those of codec.py.
"""

import functools

import torch

from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.compression.codec import CHANGE, RANDOM, TOKEN_DIM, Codec
from xfuser_cocodiff.engine.compression.lead import Lead, decoded_values
from xfuser_cocodiff.engine.compression.link_reference import LinkReference
from xfuser_cocodiff.engine.kernels import rows
from xfuser_cocodiff.engine.kernels.rows import ActiveTokens
from xfuser_cocodiff.engine.topology import devices


def select_tokens(
    values: torch.Tensor,
    reference: LinkReference,
    codec: Codec,
    seed: int,
    local_slots: range | None = None,
    lead: Lead | None = None,
) -> ActiveTokens:
    """Return the active tokens of each group: those with the highest scores.

    Args:
        values: (P, G, H, T, D).
        reference: the sender's.
        codec: gives the number of tokens and the score.
        seed: seed of random scores.
        local_slots: slots of this rank, which are skipped; None for none.
        lead: leading branch that the reference was prepared for; None if there is none.
    """
    tokens = values.shape[TOKEN_DIM]
    if codec.score == RANDOM:
        generator = torch.Generator().manual_seed(seed)
        links = rows.num_links(len(values), local_slots)
        # From pinned memory, so that the host does not wait for the copy.
        pins = devices.capabilities(values.device.type).is_asynchronous
        scores = torch.rand(tokens, generator=generator, pin_memory=pins)
        scores = scores.to(values.device, non_blocking=True).expand(links, values.shape[1], tokens)
    elif codec.score == CHANGE:
        values = rows.remote_slots(values, local_slots)
        last = decoded_values(reference, lead) if reference.last_values is None else reference.last_values
        scores = (values - last).abs().sum((2, 4), dtype=torch.float32)
        reference.last_values = values.clone(memory_format=torch.contiguous_format)
    else:
        scores = kernels.scores(values, reference.prediction(codec.predictor), local_slots, lead.base if lead else None)
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
