"""Codecs: how values are represented on slow links. Pure tensor code; nothing here communicates.

Both ends of a link hold the same reference: what the receiver was given last. A codec sends what brings it near to the
value of now, and the sender brings its own reference along by the same arithmetic. So what one step leaves out is part
of the difference that the next one sees: error feedback, for which nothing is sent.

Sizes in shapes: L links, G groups of tokens, H heads, T tokens, D head dim. A group is what one rank has of one sample.
"""

import math
from dataclasses import dataclass

import torch

from xfuser_cocodiff.quantise import STEPS, dequantise, quantise

DRIFT, CHANGE, RANDOM = SCORES = ("drift", "change", "random")
"""What makes a token active: its distance from the reference, from its value of the step before, or chance."""
TOKENS = 3
"""Dim of tokens."""
CHOOSING = "vo"
"""Tensors that choose their active tokens; Q and K take V's choice."""


@dataclass(frozen=True)
class Codec:
    """What travels of a tensor."""

    bits: int | None = None
    """Per value of the difference to the reference; None sends values themselves."""
    share: float = 1.0
    """Of the tokens, those with the highest scores are sent; the others stay as the reference has them."""
    score: str = DRIFT
    predictor: float = 0.0
    """How much of the reference's last change is expected again: an extrapolation that both ends make."""

    def __post_init__(self) -> None:
        if self.bits not in (None, *STEPS) or not 0 <= self.share <= 1 or self.score not in SCORES:
            raise ValueError(
                f"{self} is not valid; bits are {', '.join(map(str, STEPS))}, shares 0 to 1, scores {SCORES}"
            )

    @property
    def is_exact(self) -> bool:
        """Whether the receiver gets every value as it is."""
        return self.bits is None and self.share == 1

    def active(self, tokens: int) -> int:
        """How many of so many tokens are sent."""
        return math.ceil(self.share * tokens)

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes of a link for a tensor (L, G, H, T, D), without the choice of tokens."""
        _, groups, heads, tokens, dim = shape
        rows = groups * heads * self.active(tokens)
        return rows * (dim * dtype.itemsize if self.bits is None else dim * self.bits // 8 + 1)

    def __str__(self) -> str:
        parts = [] if self.bits is None else [f"{self.bits} bit"]
        parts += [f"{self.share:g} of tokens by {self.score}"] if self.share < 1 else []
        parts += [f"predictor {self.predictor:g}"] if self.predictor else []
        return ", ".join(parts) or "exact"


EXACT = Codec()


class Reference:
    """What one end of some links holds of a tensor. The other end holds the same, bit for bit.

    Args:
        compact: whether to keep it in 8 bits per value, which both ends then count as theirs.
    """

    def __init__(self, compact: bool = False) -> None:
        self._compact = compact
        self._held: tuple[torch.Tensor, ...] = ()
        self._before: tuple[torch.Tensor, ...] = ()
        self.seen: torch.Tensor | None = None
        """The values of the step before, where a sender scores by them."""

    def fits(self, values: torch.Tensor) -> bool:
        """Whether there is a reference for these values."""
        held = self._held and self._held[0]
        return bool(self._held) and held.shape[:-1] == values.shape[:-1] and self._dtype == values.dtype

    def expected(self, predictor: float) -> torch.Tensor:
        """What both ends expect of the values."""
        held = self._read(self._held)
        if not (predictor and self._before):
            return held
        return torch.add(held, held - self._read(self._before), alpha=predictor)

    def advance(self, values: torch.Tensor, keeps_change: bool) -> None:
        """Hold other values from now on, and those of before too where their change is needed."""
        self._before = self._held if keeps_change else ()
        self._dtype = values.dtype
        self._held = quantise(values, 8)[:2] if self._compact else (values,)

    def squeeze(self) -> None:
        """Keep it in 8 bits from now on."""
        if not self._compact:
            self._held, self._before = (quantise(*kept, 8)[:2] if kept else () for kept in (self._held, self._before))
            self._compact = True

    def mend(self) -> None:
        """Hold zeros in the place of what is not finite."""
        self.advance(self._read(self._held).nan_to_num(0.0, 0.0, 0.0), keeps_change=False)

    def _read(self, kept: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return dequantise(*kept, 8).to(self._dtype) if self._compact else kept[0]

    @property
    def nbytes(self) -> int:
        """What it takes."""
        kept = (*self._held, *self._before, *([] if self.seen is None else [self.seen]))
        return sum(tensor.nbytes for tensor in kept)


def choose(values: torch.Tensor, reference: Reference, codec: Codec, seed: int) -> torch.Tensor:
    """The active tokens of each group, (L, G, k), ascending.

    Args:
        values: shape (L, G, H, T, D).
        reference: of the sender.
        codec: says how many, and by which score.
        seed: for choices by chance.
    """
    tokens = values.shape[TOKENS]
    if codec.score == RANDOM:
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(tokens, generator=generator).to(values.device).expand(*values.shape[:2], tokens)
    elif codec.score == CHANGE:
        past = reference.expected(0.0) if reference.seen is None else reference.seen
        scores = (values - past).abs().sum((2, 4), dtype=torch.float32)
        reference.seen = values.clone()
    else:
        scores = (values - reference.expected(codec.predictor)).float().square_().sum((2, 4))
    return scores.topk(codec.active(tokens), -1).indices.sort(-1).values


def encode(values: torch.Tensor, reference: Reference, codec: Codec, chosen: torch.Tensor | None) -> torch.Tensor:
    """What is sent for values, uint8 (L, n), and the sender's reference brought to what the receiver makes of it.

    Args:
        values: shape (L, G, H, T, D).
        reference: of the sender; fits the values unless the codec is exact.
        codec: how.
        chosen: active tokens.
    """
    if codec.is_exact:
        reference.advance(values, bool(codec.predictor))
        return _bytes(values)
    expected = reference.expected(codec.predictor)
    base = _part(expected, chosen)
    part = _part(values, chosen)
    if codec.bits is None:
        payload = _bytes(part)
    else:
        packed, scales, difference = quantise(part - base, codec.bits)
        payload = torch.cat([scales.flatten(1), packed.flatten(1)], 1)
        part = _moved(base, difference)
    reference.advance(_with(expected, part, chosen), bool(codec.predictor))
    return payload


def decode(
    payload: torch.Tensor, reference: Reference, codec: Codec, chosen: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor:
    """Values from what was sent, and the receiver's reference brought to them.

    Args:
        payload: uint8 (L, n).
        reference: of the receiver.
        codec: how.
        chosen: active tokens.
        like: anything with the shape and dtype of the values.
    """
    if codec.is_exact:
        values = _values(payload, like)
        reference.advance(values, bool(codec.predictor))
        return values
    expected = reference.expected(codec.predictor)
    base = _part(expected, chosen)
    if codec.bits is None:
        part = _values(payload, base)
    else:
        rows, width = math.prod(base.shape[1:-1]), base.shape[-1] * codec.bits // 8
        scales, packed = payload.split([rows, payload.shape[1] - rows], 1)
        packed, scales = packed.reshape(*base.shape[:-1], width), scales.reshape(*base.shape[:-1], 1)
        part = _moved(base, dequantise(packed, scales, codec.bits))
    values = _with(expected, part, chosen)
    reference.advance(values, bool(codec.predictor))
    return values


def pack_choice(chosen: torch.Tensor, tokens: int) -> torch.Tensor:
    """A choice as a bit for each token: uint8 (L, n)."""
    mask = torch.zeros(*chosen.shape[:2], -(-tokens // 8) * 8, dtype=torch.uint8, device=chosen.device)
    mask.scatter_(-1, chosen, 1)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=chosen.device)
    return (mask.unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8).flatten(1)


def unpack_choice(payload: torch.Tensor, groups: int, tokens: int, active: int) -> torch.Tensor:
    """The inverse of :func:`pack_choice`; asks the device for nothing that the host would have to wait for."""
    bits = payload.view(payload.shape[0], groups, -1, 1) >> torch.arange(8, dtype=torch.uint8, device=payload.device)
    mask = (bits & 1).flatten(-2)[..., :tokens]
    return mask.sort(dim=-1, descending=True, stable=True).indices[..., :active]


def choice_bytes(groups: int, tokens: int) -> int:
    """Bytes of a packed choice for one link."""
    return groups * -(-tokens // 8)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    # Flat, since no token may be active, and then shapes of several dims say nothing.
    return values.contiguous().flatten().view(torch.uint8).view(len(values), values.nbytes // len(values))


def _values(payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_bytes`."""
    return payload.flatten().view(like.dtype).view(like.shape)


def _moved(base: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
    """What both ends make of a quantised difference."""
    return difference.add_(base).to(base.dtype)


def _part(values: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
    if chosen is None:
        return values
    part = values.flatten(0, TOKENS).index_select(0, _rows(chosen, values))
    return part.view(*values.shape[:TOKENS], -1, values.shape[-1])


def _with(values: torch.Tensor, part: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
    if chosen is None:
        return part
    rows = values.flatten(0, TOKENS).index_copy(0, _rows(chosen, values), part.flatten(0, TOKENS))
    return rows.view(values.shape)


def _rows(chosen: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Where chosen tokens lie among all rows of D values. Whole rows move several times as fast as single values."""
    links, groups, heads, tokens, _ = values.shape
    starts = torch.arange(0, links * groups * heads * tokens, tokens, device=values.device)
    return (starts.view(links, groups, heads, 1) + chosen[:, :, None]).flatten()
