"""Codecs: how values are represented on slow links. Pure tensor code; nothing here communicates.

Both ends of a link hold the same reference: what the receiver was given last. A codec sends what brings it near to the
value of now, and the sender brings its own reference along by the same arithmetic. So what one step leaves out is part
of the difference that the next one sees: error feedback, for which nothing is sent.

Sizes in shapes: L links, P places of which one may be the rank's own, G groups of tokens, H heads, T tokens, D head
dim. A group is what one rank has of one sample.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.kernels import rows
from xfuser_cocodiff.engine.kernels.quantize import GRIDS, compact, restored, row_bytes, tokens_per_row
from xfuser_cocodiff.engine.kernels.rows import SHARES, TOLD, ActiveTokens, Prediction
from xfuser_cocodiff.engine.kernels.torch_kernels import expected, square
from xfuser_cocodiff.engine.topology import devices as devices

DRIFT, CHANGE, RANDOM = SCORES = ("drift", "change", "random")
"""What makes a token active: its distance from the reference, from its value of the step before, or chance."""
TOKENS = 3
"""Dim of tokens."""
ADAPTIVE = "auto"
"""A predictor by what has come again of the change before."""
_USUAL_SHARE = SHARES // 2
"""Of a change that is expected again as long as nothing is known."""
CHOOSING = "vo"
"""Tensors that choose their active tokens; Q and K take V's choice."""


@dataclass(frozen=True)
class Codec:
    """What travels of a tensor."""

    bits: float | None = None
    """Per value of the difference to the reference, see quantise.GRIDS; None sends values themselves."""
    share: float = 1.0
    """Of the tokens, those with the highest scores are sent; the others stay as the reference has them. With 0 nothing
    is sent at all."""
    score: str = DRIFT
    predictor: float | str = 0.0
    """How much of the reference's last change is expected again: an extrapolation that both ends make. ADAPTS takes
    what the sender found of the change before, and sends it in a byte."""
    is_keyframe: bool = False
    """Whether there is no reference to differ from, as at the first step: values themselves are coded."""

    def __post_init__(self) -> None:
        is_sound = 0 <= self.share <= 1 and self.score in SCORES and (self.bits is not None or not self.is_keyframe)
        if self.bits not in (None, *GRIDS) or not is_sound:
            raise ValueError(
                f"{self} is not valid; bits are {', '.join(map(str, GRIDS))}, shares 0 to 1, scores {SCORES}"
            )

    @property
    def is_exact(self) -> bool:
        """Whether the receiver gets every value as it is."""
        return self.bits is None and self.share == 1

    @property
    def is_silent(self) -> bool:
        """Whether the receiver is told nothing."""
        return self.share == 0

    @property
    def chooses(self) -> bool:
        """Whether some of the tokens are sent, and others not."""
        return 0 < self.share < 1

    def active(self, tokens: int) -> int:
        """How many of so many tokens are sent."""
        return math.ceil(self.share * tokens)

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of a link for a tensor (L, G, H, T, D), without the choice of tokens."""
        if self.is_exact or self.is_silent:
            return math.prod(shape[1:]) * dtype.itemsize if self.is_exact else 0
        _, groups, heads, tokens, dim = shape
        sent = groups * heads * self.active(tokens)
        if self.bits is None:
            return sent * dim * dtype.itemsize + self._predictor_bytes
        together = tokens_per_row(self.bits, dim, tokens, self.share == 1)
        return sent // together * (row_bytes(self.bits, together * dim) + 1) + self._predictor_bytes

    @property
    def _predictor_bytes(self) -> int:
        return TOLD if self.adapts else 0

    @property
    def adapts(self) -> bool:
        """Whether the sender tells how much it extrapolates."""
        return self.predictor == ADAPTIVE and not (self.is_exact or self.is_silent or self.is_keyframe)

    @property
    def is_stateless(self) -> bool:
        """Whether it needs no reference."""
        return self.is_exact or self.is_keyframe

    def __str__(self) -> str:
        parts = [] if self.bits is None else [f"{self.bits:g} bit"]
        parts += [f"{self.share:g} of tokens by {self.score}"] if self.chooses else ["nothing"] * self.is_silent
        parts += [f"predictor {self.predictor}"] if self.predictor else []
        parts += ["keyframe_codec"] if self.is_keyframe else []
        return ", ".join(parts) or "exact"


EXACT = Codec()


class LinkReference:
    """What one end of some links holds of a tensor. The other end holds the same, bit for bit.

    Args:
        compact: whether to keep it in 8 bits per value, which both ends then count as theirs.
    """

    def __init__(self, compact: bool = False) -> None:
        self.is_compact = compact
        self._held: tuple[torch.Tensor, ...] = ()
        self._before: tuple[torch.Tensor, ...] = ()
        self.again: torch.Tensor | None = None
        """How much of the last change came again, where a sender has seen it; uint8 (L), see rows.SHARES."""
        self.seen: torch.Tensor | None = None
        """The values of the step before, where a sender scores by them."""

    def fits(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether there is a reference for such values."""
        return bool(self._held) and self._held[0].shape == tuple(shape) and self._dtype == dtype

    def expected(self, predictor: float | str = 0.0) -> torch.Tensor:
        """What both ends expect of the values."""
        return expected(self.known(predictor))

    def known(self, predictor: float | str) -> Prediction:
        """What is held, and where something is extrapolated what was held before, and how much of the change between
        them to expect again."""
        held = self._read(self._held)
        before = self._read(self._before) if predictor and self._before else None
        return Prediction(held, before, self._shares(predictor))

    def _shares(self, predictor: float | str) -> torch.Tensor:
        if predictor == ADAPTIVE and self.again is not None:
            return self.again
        held = self._held[0]
        share = _USUAL_SHARE if predictor == ADAPTIVE else round(SHARES * float(predictor))
        return _on_all_links(share, len(held), held.device)

    def advance(self, values: torch.Tensor, keeps_change: bool) -> None:
        """Hold other values from now on, and those of before too where their change is needed and they are alike."""
        self._before = self._held if keeps_change and self.fits(values.shape, values.dtype) else ()
        self._dtype = values.dtype
        self._held = compact(values) if self.is_compact else (values,)

    def stay(self, codec: Codec) -> None:
        """Hold what a codec that sends nothing expects."""
        if codec.predictor in (0.0, ADAPTIVE):  # what came again only the sender knows
            self._before = self._held if codec.predictor else ()
        else:
            self.advance(self.expected(codec.predictor), keeps_change=True)

    def to_int8(self) -> None:
        """Keep it in 8 bits from now on."""
        if not self.is_compact:
            self._held, self._before = (compact(*kept) if kept else () for kept in (self._held, self._before))
            self.is_compact = True

    def _read(self, kept: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return restored(*kept).to(self._dtype) if self.is_compact else kept[0]

    @property
    def nbytes(self) -> int:
        """What it takes."""
        kept = (*self._held, *self._before, *([] if self.seen is None else [self.seen]))
        return sum(tensor.nbytes for tensor in kept)


def choose(
    values: torch.Tensor, reference: LinkReference, codec: Codec, seed: int, here: range | None = None
) -> ActiveTokens:
    """The active tokens of each group.

    Args:
        values: shape (P, G, H, T, D).
        reference: of the sender.
        codec: says how many, and by which score.
        seed: for choices by chance.
        here: the places among P that are the rank's own, see :mod:`kernels`.
    """
    tokens = values.shape[TOKENS]
    if codec.score == RANDOM:
        generator = torch.Generator().manual_seed(seed)
        links = rows.others(len(values), here)
        # From pinned memory, so that the host need not wait for its copy.
        scores = torch.rand(
            tokens, generator=generator, pin_memory=devices.capabilities(values.device.type).is_asynchronous
        )
        scores = scores.to(values.device, non_blocking=True).expand(links, values.shape[1], tokens)
    elif codec.score == CHANGE:
        values = rows.away(values, here)
        past = reference.expected() if reference.seen is None else reference.seen
        scores = (values - past).abs().sum((2, 4), dtype=torch.float32)
        reference.seen = values.clone(memory_format=torch.contiguous_format)
    else:
        scores = kernels.scores(values, reference.known(codec.predictor), here)
    count = codec.active(tokens)
    mask = torch.zeros(*scores.shape[:2], -(-tokens // 8) * 8, dtype=torch.uint8, device=scores.device)
    return ActiveTokens(mask.scatter_(-1, scores.topk(count, -1, sorted=False).indices, 1), tokens, count)


class QuantError(NamedTuple):
    """What a receiver lacks of values: sums of squares, float32, each a tensor of one element."""

    lacking: torch.Tensor
    """Not finite where the values are not."""
    wanted: torch.Tensor
    """Of the values themselves."""


def encode(
    values: torch.Tensor,
    reference: LinkReference,
    codec: Codec,
    active: ActiveTokens | None,
    payload: torch.Tensor,
    here: range | None = None,
) -> QuantError | None:
    """Write what is sent for values, and bring the sender's reference to what the receiver makes of it.

    Args:
        values: shape (P, G, H, T, D).
        reference: of the sender; fits the values unless the codec is exact.
        codec: how.
        active: tokens that are sent, where not all are.
        payload: where to write, see :mod:`kernels`.
        here: the places among P that are the rank's own, see there.

    Returns:
        What the receiver lacks; None where it gets everything.
    """
    if codec.is_silent:
        reference.stay(codec)
        others = rows.away(values, here)
        return QuantError(square(others - reference.expected()), square(others))
    known = _known(codec, reference, values, here)
    held, lacking, wanted, again = kernels.encode(values, known, codec.bits, active, payload, here, codec.adapts)
    reference.advance(held, bool(codec.predictor))
    reference.again = reference.again if again is None else again
    if codec.is_stateless:
        reference.seen = None  # all that is held is of this step
    if lacking is None:
        return None
    if reference.is_compact:  # which loses a little more
        lacking = square(rows.away(values, here) - reference.expected())
    return QuantError(lacking, wanted)


def decode(
    payload: torch.Tensor,
    reference: LinkReference,
    codec: Codec,
    active: ActiveTokens | None,
    target: torch.Tensor,
    here: range | None = None,
) -> None:
    """Write values from what was sent, and bring the receiver's reference to them.

    Args:
        payload: of :func:`encode`.
        reference: of the receiver.
        codec: how.
        active: tokens that were sent, where not all were.
        target: for the values, (P, G, H, T, D), of any strides.
        here: the places among P that are the rank's own, and are not written; see :mod:`kernels`.
    """
    if codec.is_silent:
        reference.stay(codec)
        rows.put_away(target, reference.expected(), here)
        return
    known = _known(codec, reference, target, here)
    held = kernels.decode(payload, known, codec.bits, active, target, here, codec.adapts)
    reference.advance(held, bool(codec.predictor))


def _known(codec: Codec, reference: LinkReference, like: torch.Tensor, here: range | None) -> Prediction | None:
    """What both ends know before values like these."""
    if codec.is_keyframe:
        return Prediction(like.new_zeros(rows.others(len(like), here), *like.shape[1:]))
    return None if codec.is_exact else reference.known(codec.predictor)


@functools.cache  # made once: the host waits for what it copies to a device
def _on_all_links(share: int, links: int, device: torch.device) -> torch.Tensor:
    return torch.full((links,), share, dtype=torch.uint8, device=device)


def pack_choice(active: ActiveTokens, room: torch.Tensor, here: range | None = None) -> None:
    """Write a choice as a bit for each token: uint8 (P, n), but for the rank's own places `here`."""
    bits = active.mask.unflatten(-1, (-1, 8)) << _shifts(room.device)
    rows.put_away(room, bits.sum(-1, dtype=torch.uint8).flatten(1), here)


def unpack_choice(room: torch.Tensor, groups: int, tokens: int, count: int, here: range | None = None) -> ActiveTokens:
    """The inverse of :func:`pack_choice`; asks the device for nothing that the host would have to wait for."""
    packed = rows.away(room, here).unflatten(1, (groups, -1, 1))
    return ActiveTokens((packed >> _shifts(room.device)).bitwise_and_(1).flatten(-2), tokens, count)


@functools.cache
def _shifts(device: torch.device) -> torch.Tensor:
    """Of the bits of a byte."""
    return torch.arange(8, dtype=torch.uint8, device=device)


ALIGNED = 64
"""Parts of a message begin at multiples of it, so that values are read from where they lie."""


def aligned(size: int) -> int:
    """Bytes that a part of a message takes with the gap behind it."""
    return -(-size // ALIGNED) * ALIGNED


@functools.lru_cache(maxsize=1024)  # asked four times for each tensor of an exchange
def section_bytes(codec: Codec, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int]:
    """Bytes for one link of a tensor's choice of tokens, 0 where it makes none, and of its values.

    Args:
        codec: of the tensor.
        name: its letter.
        shape: (L, G, H, T, D) of what crosses.
        dtype: of its values.
    """
    choice = shape[1] * -(-shape[TOKENS] // 8) if codec.chooses and name in CHOOSING else 0
    return choice, codec.payload_bytes(shape, dtype)
