"""Codecs: how the values of a tensor are encoded for slow links. Tensor code only; nothing here communicates.

Both ends of a link hold the same link reference: the values that the receiver decoded last. A codec sends the quantized
residual to a prediction from that reference, and the sender updates its reference by the same arithmetic as the
receiver. What a step leaves out is therefore part of the next step's residual: error feedback without extra traffic.

Sizes in shapes: those of codec.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.compression.codec import Codec
from xfuser_cocodiff.engine.compression.lead import Lead, decoded_values
from xfuser_cocodiff.engine.compression.link_reference import LinkReference, SentValues
from xfuser_cocodiff.engine.kernels import quantize, rows
from xfuser_cocodiff.engine.kernels.rows import ActiveTokens, EncodeResult, MessagePart, Prediction
from xfuser_cocodiff.engine.kernels.torch_kernels import energy
from xfuser_cocodiff.engine.topology import devices


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


def _prediction(
    codec: Codec, reference: LinkReference, like: torch.Tensor, local_slots: range | None
) -> Prediction | None:
    """Return the prediction for values like these: zeros for a keyframe, None for a lossless codec."""
    if codec.is_keyframe:
        zeros = like.new_zeros(rows.num_links(len(like), local_slots), *like.shape[1:])
        return Prediction(zeros, channel_scales=reference.channel_scales)
    return None if codec.is_exact else reference.prediction(codec.predictor)
