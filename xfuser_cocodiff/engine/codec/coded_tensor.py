"""Coded tensors: how the values of a tensor are encoded for slow links. Nothing here communicates.

Both ends of a link hold the same link reference: the values that the receiver decoded last. A codec sends the quantized
residual to a prediction from that reference, and the sender updates its reference by the same arithmetic as the
receiver. What a step leaves out is therefore part of the next step's residual: error feedback without extra traffic.

Sizes in shapes: those of codec.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from xfuser_cocodiff.engine.codec import kernels, rows
from xfuser_cocodiff.engine.codec.active_tokens import ActiveTokens
from xfuser_cocodiff.engine.codec.codec import Codec
from xfuser_cocodiff.engine.codec.lead import Lead
from xfuser_cocodiff.engine.codec.link_reference import LinkReference
from xfuser_cocodiff.engine.codec.rows import MessagePart, Prediction
from xfuser_cocodiff.engine.codec.torch_kernels import energy


@dataclass(slots=True)
class CodedTensor:
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
    shape: tuple[int, ...] = field(init=False)
    """Shape (L, G, H, T, D) of the values that cross links."""

    def __post_init__(self) -> None:
        self.shape = rows.link_shape(self.values, self.local_slots)

    @property
    def is_quantized(self) -> bool:
        """Whether kernels code the values."""
        return self.codec.bits is not None

    @property
    def part(self) -> MessagePart:
        """Arguments of the kernels at this end."""
        values, codec, reference = self.values, self.codec, self.reference
        prediction = Prediction() if codec.is_keyframe else reference.prediction(codec.predicts)
        memory = reference.memory(self.shape, values.dtype, values.device, codec.predicts)
        base = self.lead.base if self.lead else None
        assert codec.bits is not None
        return MessagePart(values, prediction, codec.bits, self.payload, memory, self.local_slots, base)

    def advance(self, part: MessagePart) -> None:
        """Advance the reference to what the receiver decodes of quantized values, after a kernel has written it."""
        is_difference = self.lead is not None and self.lead.is_coded
        how = self.shape, self.values.dtype, self.codec.predicts, is_difference
        self.reference.advance_rows(part.new_reference, *how)
        self.finish()

    def finish(self) -> None:
        """Convert the reference to the one that the next step of a following branch needs."""
        if self.lead:
            self.lead.finish(self.reference)


def encode(tensors: Sequence[CodedTensor], energies: torch.Tensor) -> None:
    """Encode tensors into their payloads, and advance the sender's references to the values that receivers decode.

    Args:
        tensors: all on one device, of one branch.
        energies: float32 (number of lossy tensors, 2), written: the sums of squared errors and of squared values of
            quantized tensors, then of those that send some of their tokens; see :func:`kernels.encode`.
    """
    quantized = [tensor for tensor in tensors if tensor.is_quantized]
    if parts := [tensor.part for tensor in quantized]:
        kernels.encode(parts, energies[: len(parts)])
    for tensor, part in zip(quantized, parts, strict=True):
        tensor.advance(part)
    row = len(parts)
    for tensor in tensors:
        if tensor.codec.is_exact:
            _send_values(tensor, None)
        elif not tensor.is_quantized:
            _send_values(tensor, energies[row])
            row += 1


def decode(tensors: Sequence[CodedTensor]) -> None:
    """Decode payloads into the values of each tensor, and advance the receiver's references to them.

    Args:
        tensors: all on one device, of one branch.
    """
    quantized = [tensor for tensor in tensors if tensor.is_quantized]
    if parts := [tensor.part for tensor in quantized]:
        kernels.decode(parts)
    for tensor, part in zip(quantized, parts, strict=True):
        tensor.advance(part)
    for tensor in tensors:
        if not tensor.is_quantized:
            _receive_values(tensor)


def _send_values(tensor: CodedTensor, energies: torch.Tensor | None) -> None:
    """Write the values of active tokens to the payload, and advance the sender's reference.

    Args:
        tensor: the tensor.
        energies: float32 (2), written: see :func:`encode`; None if all tokens are sent.
    """
    values, reference = rows.remote_slots(tensor.values, tensor.local_slots), tensor.reference
    if not tensor.codec.sends_nothing:
        sent = values if tensor.active is None else tensor.active.select(values)
        rows.write_remote_slots(tensor.payload.view(values.dtype), sent.flatten(1), tensor.local_slots)
    if energies is None:
        reference.advance(values)
        reference.last_values = None  # the reference is of this step
        tensor.finish()
        return
    if tensor.active is not None:
        reference.advance(tensor.active.replace(reference.values, sent))
    energies[0], energies[1] = energy(values - reference.values), energy(values)


def _receive_values(tensor: CodedTensor) -> None:
    """Read the values of active tokens from the payload, and advance the receiver's reference; others keep theirs."""
    target, reference = tensor.values, tensor.reference
    if tensor.codec.sends_nothing:
        rows.write_remote_slots(target, reference.values, tensor.local_slots)
        return
    payload = rows.remote_slots(tensor.payload.view(target.dtype), tensor.local_slots)
    shape = [*tensor.shape]
    if tensor.active is None:
        received = payload.view(shape)
    else:
        shape[3] = tensor.active.count
        received = tensor.active.replace(reference.values, payload.view(shape))
    rows.write_remote_slots(target, received, tensor.local_slots)
    reference.advance(received)
    tensor.finish()
