"""The Triton kernels that score tokens, and put the selected ones in order."""

import triton
import triton.language as tl

from xfuser_cocodiff.engine.kernels.triton_tensors import load_base, predict, row_start


@triton.jit(do_not_specialize=["groups", "heads", "tokens", "local_start", "local_count"])
def scores_kernel(
    values, reference, previous, gains, scores,
    groups, heads, tokens, local_start, local_count, stride_slot, stride_group, stride_head, stride_token,
    base, weight, stride_base_link, stride_base_group, stride_base_head, stride_base_token,
    dim: tl.constexpr, block_dim: tl.constexpr, block_tokens: tl.constexpr,
):  # fmt: skip
    """Compute the scores of some tokens of one group and link per program, over all heads.

    Args:
        values: (P, G, H, T, D).
        reference: link reference (L, G, H, T, D), contiguous.
        previous: link reference of the step before, of the same shape; None to predict the reference itself.
        gains: uint8 (L); not read without a previous reference.
        scores: float32 (L, G, T), written: squared distance to the prediction, summed over heads and dims.
        groups, heads, tokens: G, H and T.
        local_start, local_count: first slot of this rank, or L without local slots; number of local slots.
        stride_slot, stride_group, stride_head, stride_token: strides of the values.
        base: base (L, G, H, T, D) that is subtracted from the values, or None.
        weight: weight of the base, or None.
        stride_base_link, stride_base_group, stride_base_head, stride_base_token: strides of the base, or None.
        dim, block_dim: D, and D rounded up to a power of two.
        block_tokens: tokens per program.
    """
    blocks, column = tl.cdiv(tokens, block_tokens), tl.arange(0, block_dim)
    pair = tl.program_id(0) // blocks
    token = tl.program_id(0) % blocks * block_tokens + tl.arange(0, block_tokens)
    link, group = pair // groups, pair % groups
    slot = link + (link >= local_start) * local_count
    inside = (token < tokens)[:, None] & (column < dim)[None, :]
    gain = 0
    if previous is not None:
        gain = tl.load(gains + link)
    total = tl.zeros([block_tokens], tl.float32)
    for head in range(heads):
        offset = ((pair.to(tl.int64) * heads + head) * tokens + token)[:, None] * dim + column[None, :]
        start = row_start(slot, group, head + 0 * token, token, stride_slot, stride_group, stride_head, stride_token)
        value = tl.load(values + start[:, None] + column[None, :], mask=inside, other=0.0)
        if base is not None:
            subtracted = load_base(
                base, weight, link, group, head + 0 * token[:, None], token[:, None], column[None, :], inside,
                stride_base_link, stride_base_group, stride_base_head, stride_base_token,
            )  # fmt: skip
            value = (value.to(tl.float32) - subtracted).to(value.dtype)
        predicted, _, _ = predict(reference, previous, offset, inside, gain)
        residual = (value.to(tl.float32) - predicted.to(tl.float32)).to(value.dtype).to(tl.float32)
        total += tl.sum(tl.where(inside, residual * residual, 0.0), 1)
    tl.store(scores + pair.to(tl.int64) * tokens + token, total, mask=token < tokens)


@triton.jit(do_not_specialize=["stride_mask", "tokens", "active"])
def order_kernel(mask, order, stride_mask, tokens, active, block: tl.constexpr):
    """Write the active tokens of a group and then the others, each ascending; a program has a group.

    Args:
        mask: uint8 (groups, tokens or more); 1 marks an active token.
        order: int32 (groups, tokens), written.
        stride_mask: stride of the mask's groups.
        tokens, active: number of tokens, and of active ones, per group.
        block: number of tokens that are read at once.
    """
    group, sent = tl.program_id(0), 0
    for first in range(0, tokens, block):
        token = first + tl.arange(0, block)
        is_active = tl.load(mask + group * stride_mask + token, mask=token < tokens, other=0).to(tl.int32)
        before = sent + tl.cumsum(is_active, 0) - is_active  # active tokens before this one
        position = tl.where(is_active > 0, before, active + token - before)
        tl.store(order + group * tokens + position, token, mask=token < tokens)
        sent += tl.sum(is_active, 0)
