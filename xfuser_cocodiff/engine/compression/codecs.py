"""Codecs: how the values of a tensor are encoded for slow links. Tensor code only; nothing here communicates.

Both ends of a link hold the same link reference: the values that the receiver decoded last. A codec sends the quantized
residual to a prediction from that reference, and the sender updates its reference by the same arithmetic as the
receiver. What a step leaves out is therefore part of the next step's residual: error feedback without extra traffic.

Branches of classifier-free guidance may be coded together. Of a following branch, the difference to the leading branch
is coded, against a reference of that difference. The sender subtracts the true values of the leading branch, and the
receiver adds those that it has decoded. So both branches have the error of the leading one, and most of it cancels in
the guided sum, which amplifies errors that differ.

Sizes in shapes: P slots, one per destination; L links, the slots of other ranks; G groups of tokens, H heads, T tokens,
D head dim. A group has the tokens of one sample from one rank.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.compression.link_reference import ADAPTIVE, LinkReference, SentValues
from xfuser_cocodiff.engine.kernels import quantize, rows
from xfuser_cocodiff.engine.kernels.quantize import GRIDS, level_bytes, tokens_per_row
from xfuser_cocodiff.engine.kernels.rows import GAIN_BYTES, ActiveTokens, Base, EncodeResult, MessagePart, Prediction
from xfuser_cocodiff.engine.kernels.torch_kernels import energy
from xfuser_cocodiff.engine.topology import devices

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


class Lead(NamedTuple):
    """The leading branch of a tensor at one end of its links, for a branch that follows it."""

    reference: LinkReference
    """Reference of the leading branch at this end; its weight is 0."""
    weight: float
    """Weight of the leading branch in the difference that is coded; 0 to code the values by themselves."""
    next_weight: float
    """Weight of the leading branch in the reference that is left for the next step."""
    sent: SentValues | None = None
    """At the sender, the values that the leading branch has sent in this step, if they are subtracted."""
    tokens: int | None = None
    """Number of tokens of the following branch; None if it is the leading one's."""
    blocks: int = 1
    """Number of blocks of adjacent tokens, of different ranks."""

    @property
    def base(self) -> Base | None:
        """What is subtracted before encoding and added after decoding; None if nothing is."""
        if not self.weight:
            return None
        return Base(self._aligned(self.sent.read()) if self.sent else self.decoded(), self.weight)

    def decoded(self) -> torch.Tensor:
        """Return what both ends hold of the leading branch, by the tokens of the following one, (L, G, H, T, D)."""
        return self._aligned(self.reference.predict())

    def _aligned(self, values: torch.Tensor) -> torch.Tensor:
        """Return values by the tokens of the following branch, zeros for those that only that branch has.

        Branches differ in the length of their text, which is before the image in models with two calls.
        """
        if self.tokens is None:
            return values
        by_block = values.unflatten(TOKEN_DIM, (self.blocks, -1))
        missing = self.tokens // self.blocks - by_block.shape[TOKEN_DIM + 1]
        return functional.pad(by_block, (0, 0, missing, 0)).flatten(TOKEN_DIM, TOKEN_DIM + 1)

    def alone(self) -> "Lead":
        """Return the lead of a tensor whose values are coded by themselves after all."""
        return self._replace(weight=0.0, sent=None)

    def prepare(self, reference: LinkReference, codec: Codec) -> None:
        """Convert the following branch's reference to one of what is coded; both ends do so for a whole message."""
        if not codec.is_stateless:
            self.rebase(reference, self.weight)

    def rebase(self, reference: LinkReference, weight: float) -> None:
        """Convert the following branch's reference to one with another weight of the leading branch."""
        if weight != reference.weight:
            values = reference.predict() + self.decoded() * (reference.weight - weight)
            reference.advance(values, keeps_previous=False, weight=weight)


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


class QuantError(NamedTuple):
    """Reconstruction error of the values that a receiver decodes; both are float32 tensors of one element."""

    error_energy: torch.Tensor
    """Sum of squared errors; not finite if the values are not."""
    value_energy: torch.Tensor
    """Sum of squared values."""


class CodedTensor(NamedTuple):
    """A tensor at one end of its links, and how it is coded."""

    values: torch.Tensor
    """(P, G, H, T, D), of any strides: the values to encode, or the target that decoded values are written to."""
    reference: LinkReference
    """Reference at this end; the sender's must fit the values unless the codec is stateless."""
    codec: Codec
    """Codec of the sender."""
    active: ActiveTokens | None
    """Tokens that are sent; None for all."""
    payload: torch.Tensor
    """uint8 (P, n); see :class:`rows.MessagePart`."""
    local_slots: range | None = None
    """Slots of this rank, which are skipped; None for none."""
    lead: Lead | None = None
    """Leading branch that the reference was prepared for; None if there is none."""
    sent_values: SentValues | None = None
    """For the encoder: where the error is noted for branches that follow; None if none does."""

    def sender_part(self) -> MessagePart:
        """Return the arguments of the encoder, and write the scales of channels to the payload of a keyframe."""
        scales = None
        if self.codec.is_keyframe:
            scales = rows.remote_slots(quantize.channel_scales(self.values), self.local_slots)
            exponents = quantize.exponents_of(scales).flatten(1)
            rows.write_remote_slots(self._channel_section, exponents, self.local_slots)
        return self._part(scales)

    def receiver_part(self) -> MessagePart:
        """Return the arguments of the decoder."""
        scales = None
        if self.codec.is_keyframe:
            exponents = rows.remote_slots(self._channel_section, self.local_slots)
            scales = quantize.powers_of(exponents.unflatten(1, (self.values.shape[2], -1)))
        return self._part(scales)

    def _part(self, channel_scales: torch.Tensor | None) -> MessagePart:
        """Return the arguments of the kernels, after the reference has the channel scales that they divide by.

        Args:
            channel_scales: those of a keyframe; None otherwise.
        """
        codec, base, payload = self.codec, self.lead.base if self.lead else None, self.payload
        reference = self.reference
        if channel_scales is not None:
            payload = payload[:, : -self._num_channels]
        elif reference.needs_channel_scales and codec.bits is not None:
            channel_scales = quantize.channel_scales(reference.predict())  # both ends hold the same values
        if channel_scales is not None:
            reference.channel_scales, reference.needs_channel_scales = _without_ones(channel_scales), False
        prediction = _prediction(codec, reference, self.values, self.local_slots)
        how = prediction, codec.bits, self.active, payload, self.local_slots, codec.sends_gain, base
        return MessagePart(self.values, *how)

    @property
    def _num_channels(self) -> int:
        return self.values.shape[2] * self.values.shape[4]

    @property
    def _channel_section(self) -> torch.Tensor:
        """Exponents of the scales of channels at the end of a keyframe's payload, uint8 (P, H * D)."""
        return self.payload[:, -self._num_channels :]

    def advance(self, reference: torch.Tensor) -> None:
        """Advance the reference to what the receiver decodes, (L, G, H, T, D)."""
        weight = self.lead.weight if self.lead else 0.0
        self.reference.advance(reference, bool(self.codec.predictor), weight)
        if self.codec.is_exact:
            self.reference.channel_scales, self.reference.needs_channel_scales = None, True


def encode(tensors: Sequence[CodedTensor]) -> list[QuantError | None]:
    """Encode tensors into their payloads, and advance the sender's references to the values that receivers decode.

    Args:
        tensors: all on one device; a leading branch before those that follow it.

    Returns:
        The reconstruction error of each, or None if its codec is lossless.
    """
    parts = [tensor.sender_part() for tensor in tensors if not tensor.codec.sends_nothing]
    results = iter(kernels.encode(parts) if parts else ())
    return [
        _advance_unsent(tensor) if tensor.codec.sends_nothing else _advance_sent(tensor, next(results))
        for tensor in tensors
    ]


def _without_ones(channel_scales: torch.Tensor) -> torch.Tensor | None:
    """Return scales of channels; on CPUs None if all are 1. Accelerators skip this check, which would synchronize."""
    is_known = not devices.capabilities(channel_scales.device.type).is_asynchronous
    return None if is_known and bool((channel_scales == 1).all()) else channel_scales


def _advance_unsent(tensor: CodedTensor) -> QuantError:
    """Advance the sender's reference of a tensor that is not sent, and return its error."""
    tensor.reference.advance_unsent(tensor.codec.predictor)
    remote = rows.remote_slots(tensor.values, tensor.local_slots)
    error = QuantError(energy(remote - decoded_values(tensor.reference, tensor.lead)), energy(remote))
    if tensor.sent_values:
        tensor.sent_values.error_energy = error.error_energy
    return error


def _advance_sent(tensor: CodedTensor, result: EncodeResult) -> QuantError | None:
    """Advance the sender's reference of a tensor that was encoded, and return its error."""
    reference, lead = tensor.reference, tensor.lead
    tensor.advance(result.reference)
    reference.gains = reference.gains if result.gains is None else result.gains
    if tensor.codec.is_stateless:
        reference.last_values = None  # the reference is of this step
    error_energy = result.error_energy
    if error_energy is not None:
        error_energy = _error_energy(error_energy, tensor.values, reference, tensor.local_slots, lead)
        if tensor.sent_values:
            tensor.sent_values.error_energy = error_energy
    if lead:
        lead.rebase(reference, lead.next_weight)
    return None if error_energy is None else QuantError(error_energy, result.value_energy)


def _error_energy(
    energy_of_coded: torch.Tensor,
    values: torch.Tensor,
    reference: LinkReference,
    local_slots: range | None,
    lead: Lead | None,
) -> torch.Tensor:
    """Return the sum of squared errors of the values that a receiver decodes.

    Args:
        energy_of_coded: sum of squared errors of what was coded: the values, or their difference to the leading branch.
        values: (P, G, H, T, D).
        reference: the sender's, after it has advanced.
        local_slots: slots of this rank, which are skipped; None for none.
        lead: leading branch; None if there is none.
    """
    if reference.is_int8:  # storing the reference in int8 adds to the error
        return energy(rows.remote_slots(values, local_slots) - decoded_values(reference, lead))
    if lead is None or lead.sent is None or lead.sent.error_energy is None:
        return energy_of_coded
    return energy_of_coded + lead.weight**2 * lead.sent.error_energy  # both errors are independent


def decode(tensors: Sequence[CodedTensor]) -> None:
    """Decode payloads into the values of each tensor, and advance the receiver's references to them.

    Args:
        tensors: all on one device; a following branch needs a call after that of its leading branch.
    """
    parts = [tensor.receiver_part() for tensor in tensors if not tensor.codec.sends_nothing]
    decoded = iter(kernels.decode(parts) if parts else ())
    for tensor in tensors:
        if tensor.codec.sends_nothing:
            tensor.reference.advance_unsent(tensor.codec.predictor)
            decoded_tensor = decoded_values(tensor.reference, tensor.lead)
            rows.write_remote_slots(tensor.values, decoded_tensor, tensor.local_slots)
            continue
        tensor.advance(next(decoded))
        if tensor.lead:
            tensor.lead.rebase(tensor.reference, tensor.lead.next_weight)


def decoded_values(reference: LinkReference, lead: Lead | None) -> torch.Tensor:
    """Return the values that receivers have decoded, (L, G, H, T, D)."""
    decoded = reference.predict()
    if lead is None or not reference.weight:
        return decoded
    return (decoded.float() + reference.weight * lead.decoded().float()).to(decoded.dtype)


def _prediction(
    codec: Codec, reference: LinkReference, like: torch.Tensor, local_slots: range | None
) -> Prediction | None:
    """Return the prediction for values like these: zeros for a keyframe, None for a lossless codec."""
    if codec.is_keyframe:
        zeros = like.new_zeros(rows.num_links(len(like), local_slots), *like.shape[1:])
        return Prediction(zeros, channel_scales=reference.channel_scales)
    return None if codec.is_exact else reference.prediction(codec.predictor)


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
