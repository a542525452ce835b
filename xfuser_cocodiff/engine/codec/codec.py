"""Codec of a tensor: bits per value, active tokens and prediction, and the bytes that it sends.

Sizes in shapes: P slots, one per destination; L links, the slots of other ranks; G groups of tokens, H heads, T tokens,
D head dim. A group has the tokens of one sample from one rank.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.codec.quantize import GRIDS
from xfuser_cocodiff.engine.codec.rows import PayloadLayout, rows_of

LETTERS = "qkvo"
"""Letters of the tensors of a layer."""
TOKEN_DIM = 3
"""Dim of the tokens in values (L, G, H, T, D)."""
SELECTING = "vo"
"""Tensors that select their own active tokens; Q and K use V's selection."""


@dataclass(frozen=True)
class Codec:
    """How a tensor is encoded: bits per value, active tokens, and prediction."""

    bits: float | None = None
    """Bits per value of the residual, one of quantize.GRIDS; None sends the values themselves."""
    token_fraction: float = 1.0
    """Fraction of the tokens that is sent, those that have changed most since the last step; 0 sends nothing. Receivers
    predict the other tokens."""
    predicts: bool = False
    """Whether both ends extrapolate the reference's last change, at a gain that the sender estimates and sends."""
    is_keyframe: bool = False
    """Whether values are encoded without a reference, as at the first step."""

    def __post_init__(self) -> None:
        has_values = self.bits is not None or not self.is_keyframe
        has_all = self.bits is None or self.token_fraction == 1
        if self.bits not in (None, *GRIDS) or not (0 <= self.token_fraction <= 1 and has_values and has_all):
            raise ValueError(
                f"{self} is not valid; bits are {', '.join(map(str, GRIDS))}, or None with a token_fraction of 0 to 1"
            )

    @property
    def is_exact(self) -> bool:
        """Whether the codec is lossless."""
        return self.bits is None and self.token_fraction == 1

    @property
    def sends_nothing(self) -> bool:
        """Whether the payload is empty."""
        return self.token_fraction == 0

    @property
    def selects_tokens(self) -> bool:
        """Whether only active tokens are sent."""
        return 0 < self.token_fraction < 1

    def num_active(self, tokens: int) -> int:
        """Return the number of active tokens among `tokens`."""
        return math.ceil(self.token_fraction * tokens)

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the payload bytes of one link for a tensor (L, G, H, T, D), without the token mask."""
        if self.is_exact or self.sends_nothing:
            return math.prod(shape[1:]) * dtype.itemsize if self.is_exact else 0
        _, groups, heads, tokens, dim = shape
        if self.bits is None:
            return groups * heads * self.num_active(tokens) * dim * dtype.itemsize
        return PayloadLayout.of(self.bits, *rows_of(shape), self.sends_gain).size

    @property
    def sends_gain(self) -> bool:
        """Whether the payload carries the sender's gain."""
        return self.predicts and self.bits is not None and not self.is_keyframe

    def __str__(self) -> str:
        parts = [] if self.bits is None else [f"{self.bits:g} bits"]
        parts += [f"{self.token_fraction:g} of the tokens"] if self.selects_tokens else []
        parts += ["nothing sent"] if self.sends_nothing else []
        parts += ["predicted"] if self.predicts else []
        parts += ["keyframe"] if self.is_keyframe else []
        return ", ".join(parts) or "exact"


EXACT = Codec()
ALIGNMENT = 64
"""Alignment of the sections of a message in bytes, so that values can be read in place."""
FLAG_BYTES = 1
"""Bytes of the flag at the start of a message."""


class MessageLayout(NamedTuple):
    """The sections of one slot's message: a flag, and for each tensor a token mask and its encoded values.

    A section begins at a multiple of ALIGNMENT.
    """

    masks: list[tuple[int, int]]
    """Offset and bytes of each tensor's token mask, which has no bytes where all tokens are sent."""
    payloads: list[tuple[int, int]]
    """Offset and bytes of each tensor's encoded values."""
    nbytes: int
    """Bytes of the message."""


@functools.lru_cache(maxsize=4096)  # for every message
def message_layout(tensors: tuple[tuple[str, Codec, tuple[int, ...]], ...], dtype: torch.dtype) -> MessageLayout:
    """Return the layout of a message.

    Args:
        tensors: letter, codec and shape (L, G, H, T, D) of each tensor.
        dtype: type of the values.
    """
    layout, end = MessageLayout([], [], 0), ALIGNMENT  # behind the flag
    for letter, codec, shape in tensors:
        has_mask = codec.selects_tokens and letter in SELECTING
        mask_bytes = shape[1] * -(-shape[TOKEN_DIM] // 8) if has_mask else 0
        for sections, size in ((layout.masks, mask_bytes), (layout.payloads, codec.payload_bytes(shape, dtype))):
            sections.append((end, size))
            end += size + -size % ALIGNMENT
    return layout._replace(nbytes=end)
