"""Codec of a tensor: bits per value, active tokens and prediction, and the bytes that it sends.

Sizes in shapes: P slots, one per destination; L links, the slots of other ranks; G groups of tokens, H heads, T tokens,
D head dim. A group has the tokens of one sample from one rank.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xfuser_cocodiff.engine.compression.link_reference import ADAPTIVE
from xfuser_cocodiff.engine.kernels.quantize import GRIDS, level_bytes, tokens_per_row
from xfuser_cocodiff.engine.kernels.rows import GAIN_BYTES

DRIFT, CHANGE, RANDOM = SCORES = ("drift", "change", "random")
"""Scores by which active tokens are selected: distance from the prediction, from the step before, or random."""
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
    """Fraction of the tokens that is sent, those with the highest scores; 0 sends nothing. Receivers predict
    the other tokens."""
    score: str = DRIFT
    """Score that selects active tokens, one of SCORES."""
    predictor: float | str = 0.0
    """Gain at which both ends extrapolate the reference's last change, from 0 to 1; ADAPTIVE sends an estimate of it in
    the payload."""
    is_keyframe: bool = False
    """Whether values are encoded without a reference, as at the first step."""

    def __post_init__(self) -> None:
        is_valid = 0 <= self.token_fraction <= 1 and self.score in SCORES
        has_values = self.bits is not None or not self.is_keyframe
        if self.bits not in (None, *GRIDS) or not (is_valid and has_values):
            raise ValueError(
                f"{self} is not valid; bits are {', '.join(map(str, GRIDS))}, token_fraction is 0 to 1, scores are "
                f"{', '.join(SCORES)}"
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
        sent = groups * heads * self.num_active(tokens)
        if self.bits is None:
            return sent * dim * dtype.itemsize + self._gain_bytes
        row_tokens = tokens_per_row(self.bits, dim, tokens, self.token_fraction == 1)
        rows, channels = sent // row_tokens, heads * dim if self.is_keyframe else 0
        return level_bytes(self.bits, rows, row_tokens * dim) + rows + self._gain_bytes + channels

    @property
    def _gain_bytes(self) -> int:
        return GAIN_BYTES if self.sends_gain else 0

    @property
    def sends_gain(self) -> bool:
        """Whether the payload carries the sender's gain."""
        return self.predictor == ADAPTIVE and not (self.is_exact or self.sends_nothing or self.is_keyframe)

    @property
    def sends_values(self) -> bool:
        """Whether values are sent unquantized; then no difference to another branch is coded."""
        return self.bits is None and not self.sends_nothing

    @property
    def is_stateless(self) -> bool:
        """Whether no reference is needed."""
        return self.is_exact or self.is_keyframe

    def __str__(self) -> str:
        parts = [] if self.bits is None else [f"{self.bits:g} bits"]
        parts += [f"{self.token_fraction:g} of the tokens by {self.score}"] if self.selects_tokens else []
        parts += ["nothing sent"] if self.sends_nothing else []
        parts += [f"predictor {self.predictor}"] if self.predictor else []
        parts += ["keyframe"] if self.is_keyframe else []
        return ", ".join(parts) or "exact"


EXACT = Codec()
ALIGNMENT = 64
"""Alignment of the sections of a message in bytes, so that values can be read in place."""


def aligned(size: int) -> int:
    """Return a section's bytes with its padding."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@functools.lru_cache(maxsize=1024)  # called four times for each tensor of a message
def section_bytes(codec: Codec, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a tensor's two sections for one link: its token mask, or 0 without one, and its payload.

    Args:
        codec: the tensor's.
        name: name of the tensor, which begins with its letter.
        shape: (L, G, H, T, D) of the values that cross the links.
        dtype: type of the values.
    """
    mask = shape[1] * -(-shape[TOKEN_DIM] // 8) if codec.selects_tokens and name[0] in SELECTING else 0
    return mask, codec.payload_bytes(shape, dtype)
