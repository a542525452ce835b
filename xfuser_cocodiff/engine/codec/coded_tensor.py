"""Codecs: how the values of a tensor are encoded for slow links. Tensor code only; nothing here communicates.

Both ends of a link hold the same link reference: the values that the receiver decoded last. A codec sends the quantized
residual to a prediction from that reference, and the sender updates its reference by the same arithmetic as the
receiver. What a step leaves out is therefore part of the next step's residual: error feedback without extra traffic.

Sizes in shapes: those of codec.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.codec import kernels, rows
from xfuser_cocodiff.engine.codec.active_tokens import ActiveTokens
from xfuser_cocodiff.engine.codec.codec import Codec
from xfuser_cocodiff.engine.codec.lead import Lead, decoded_values
from xfuser_cocodiff.engine.codec.link_reference import LinkReference, SentValues
from xfuser_cocodiff.engine.codec.rows import EncodeResult, Int8Rows, MessagePart, Prediction
from xfuser_cocodiff.engine.codec.torch_kernels import energy


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
    """Tokens that are sent, of values that are not quantized; None for all."""
    payload: torch.Tensor
    """uint8 (P, n); see :class:`rows.MessagePart`. Values that are not quantized are in it as they are."""
    local_slots: range | None = None
    """Slots of this rank, which are skipped; None for none."""
    lead: Lead | None = None
    """Leading branch that the reference was prepared for; None if there is none."""
    sent_values: SentValues | None = None
    """For the encoder: where the error is noted for branches that follow; None if none does."""

    @property
    def is_quantized(self) -> bool:
        """Whether kernels code the values."""
        return self.codec.bits is not None

    @property
    def part(self) -> MessagePart:
        """Arguments of the kernels at this end."""
        codec, base = self.codec, self.lead.base if self.lead else None
        prediction = Prediction() if codec.is_keyframe else self.reference.prediction(codec.predicts)
        assert codec.bits is not None
        return MessagePart(self.values, prediction, codec.bits, self.payload, self.local_slots, codec.sends_gain, base)

    @property
    def link_shape(self) -> tuple[int, ...]:
        """Shape (L, G, H, T, D) of the values that cross links."""
        return rows.num_links(len(self.values), self.local_slots), *self.values.shape[1:]

    def advance(self, reference: Int8Rows) -> None:
        """Advance the reference to what the receiver decodes of quantized values."""
        weight = self.lead.weight if self.lead else 0.0
        self.reference.advance_rows(reference, self.link_shape, self.values.dtype, self.codec.predicts, weight)

    def rebase(self) -> None:
        """Convert the reference to the one that the next step of a following branch needs."""
        if self.lead:
            self.lead.rebase(self.reference, self.lead.next_weight)


def encode(tensors: Sequence[CodedTensor]) -> list[QuantError | None]:
    """Encode tensors into their payloads, and advance the sender's references to the values that receivers decode.

    Args:
        tensors: all on one device; a leading branch before those that follow it.

    Returns:
        The reconstruction error of each, or None if its codec is lossless.
    """
    parts = [tensor.part for tensor in tensors if tensor.is_quantized]
    results = iter(kernels.encode(parts) if parts else ())
    return [_advance_sent(tensor, next(results)) if tensor.is_quantized else _send_values(tensor) for tensor in tensors]


def decode(tensors: Sequence[CodedTensor]) -> None:
    """Decode payloads into the values of each tensor, and advance the receiver's references to them.

    Args:
        tensors: all on one device; a following branch needs a call after that of its leading branch.
    """
    parts = [tensor.part for tensor in tensors if tensor.is_quantized]
    decoded = iter(kernels.decode(parts) if parts else ())
    for tensor in tensors:
        if tensor.is_quantized:
            tensor.advance(next(decoded))
            tensor.rebase()
        else:
            _receive_values(tensor)


def round_trip(tensor: CodedTensor) -> tuple[QuantError, torch.Tensor]:
    """Encode a quantized tensor whose sender and receiver share a reference.

    Returns:
        The reconstruction error, and the values that the receiver decodes, (L, G, H, T, D).
    """
    part, target = tensor.part, torch.empty_like(tensor.values)
    [result] = kernels.encode([part])
    base = tensor.lead.decoded if tensor.lead and tensor.lead.weight else None
    kernels.decode([part._replace(values=target, base=base)])
    return _advance_sent(tensor, result), target


def _advance_sent(tensor: CodedTensor, result: EncodeResult) -> QuantError:
    """Advance the sender's reference of a tensor that was encoded, and return its error."""
    reference, lead = tensor.reference, tensor.lead
    tensor.advance(result.reference)
    reference.gains = reference.gains if result.gains is None else result.gains
    error_energy = result.error_energy
    if lead and lead.sent and lead.sent.error_energy is not None:
        error_energy = error_energy + lead.weight**2 * lead.sent.error_energy  # both errors are independent
    if tensor.sent_values:
        tensor.sent_values.error_energy = error_energy
    tensor.rebase()
    return QuantError(error_energy, result.value_energy)


def _send_values(tensor: CodedTensor) -> QuantError | None:
    """Write the values of active tokens to the payload, and advance the sender's reference.

    Returns:
        The reconstruction error; None if all tokens are sent.
    """
    values, reference = rows.remote_slots(tensor.values, tensor.local_slots), tensor.reference
    if not tensor.codec.sends_nothing:
        sent = values if tensor.active is None else tensor.active.select(values)
        rows.write_remote_slots(tensor.payload.view(values.dtype), sent.flatten(1), tensor.local_slots)
    if tensor.codec.is_exact:
        reference.advance(values)
        reference.last_values = None  # the reference is of this step
        tensor.rebase()
        return None
    if tensor.active is not None:
        reference.advance(tensor.active.replace(reference.values, sent))
    return QuantError(energy(values - reference.values), energy(values))


def _receive_values(tensor: CodedTensor) -> None:
    """Read the values of active tokens from the payload, and advance the receiver's reference; others keep theirs."""
    target, reference = tensor.values, tensor.reference
    if not tensor.codec.sends_nothing:
        payload = rows.remote_slots(tensor.payload.view(target.dtype), tensor.local_slots)
        shape = [*tensor.link_shape]
        if tensor.active is None:
            received = payload.view(shape)
        else:
            shape[3] = tensor.active.count
            received = tensor.active.replace(reference.values, payload.view(shape))
        rows.write_remote_slots(target, received, tensor.local_slots)
        reference.advance(received)
        tensor.rebase()
    else:
        rows.write_remote_slots(target, decoded_values(reference, tensor.lead), tensor.local_slots)
