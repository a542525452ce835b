"""Messages: the tensors of one collective, encoded into one buffer per slot at the sender and decoded at the receiver.

Sizes in shapes: P slots, L of them of other ranks; G groups of tokens, H heads, T tokens, D head dim.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from xfuser_cocodiff.engine.codec import coded_tensor, rows, yardsticks
from xfuser_cocodiff.engine.codec.active_tokens import pack_active, unpack_active
from xfuser_cocodiff.engine.codec.codec import EXACT, FLAG_BYTES, MessageLayout, message_layout
from xfuser_cocodiff.engine.codec.coded_tensor import CodedTensor
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.coding_choice import active_tokens_for, choose, selecting_name
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs, LinkState
from xfuser_cocodiff.engine.compression.step_errors import TensorError
from xfuser_cocodiff.engine.topology import devices

WIRE_FORMAT = 4
"""Version of the messages; raised when bytes or the arithmetic of both ends change. All ranks must have the same."""
_FINITE, _NOT_FINITE = 0, 1
"""Flag of a message: whether all values of its sender are finite. On accelerators it is neither written nor read, since
the host would have to wait."""
_NO_PAYLOAD = torch.empty(0, dtype=torch.uint8)
"""Payload of a tensor until the message is laid out."""


@dataclass(slots=True, kw_only=True)
class _Part(CodedTensor):
    """A tensor of a message: at the sender's end until it is decoded, then at the receiver's."""

    name: str
    """Letter of the tensor."""
    state: LinkState
    leader: LinkState | None
    """Link state of the tensor in the leading branch; None if it follows none."""
    error: TensorError | None
    """Error of the tensor; None if it is lossless."""

    def receive(self, target: torch.Tensor, payload: torch.Tensor, local_slots: range) -> None:
        """Turn to the receiver's end.

        Args:
            target: (P, G, H, T, D), written when the tensor is decoded.
            payload: what has arrived.
            local_slots: slots of this rank, which are skipped.
        """
        self.values, self.payload, self.local_slots = target, payload, local_slots
        self.shape, self.reference = rows.link_shape(target, local_slots), self.state.received
        if self.lead and self.leader:
            self.lead = self.lead._replace(reference=self.leader.received, sent=None)
            self.lead.prepare(self.reference, self.codec)


class Message:
    """The tensors of one collective, from encoding what is sent to decoding what has arrived.

    Args:
        label: a letter for each tensor, and the head group of the values.
        values: (P, G, H, T, D) each, by destination, without gradients.
        layer_codecs: codecs and link states of the layer.
        local_slots: slots of this rank, which are skipped.
        copies: number of receivers that all get the same values; P is then 1 when encoding. None if each slot has
            values of its own.
    """

    def __init__(
        self,
        label: Label,
        values: Sequence[torch.Tensor],
        layer_codecs: LayerCodecs,
        local_slots: range,
        copies: int | None = None,
    ) -> None:
        self._names, self._values = label.tensors, values
        self._layer_codecs, self._head_group = layer_codecs, label.head_group
        self._local_slots, self._copies = local_slots, copies or 1
        self._unsent_slots = None if copies else local_slots
        self._parts: list[_Part] = []
        self._layout: MessageLayout | None = None

    def encode(self) -> torch.Tensor:
        """Choose codecs and active tokens, encode the values, and mark the link states as in flight.

        Returns:
            uint8 (P, bytes), in memory that the next message of the run uses again. Local slots have the flag
            only.
        """
        # V first: it selects the active tokens of Q and K.
        by_name = sorted(zip(self._names, self._values, strict=True), key=lambda item: item[0] != "v")
        self._parts = [self._part(name, values) for name, values in by_name]
        for part in self._parts:
            part.state.in_flight = True
        return self._encode(self._layer_codecs.send_buffer.view)

    def _part(self, name: str, values: torch.Tensor) -> _Part:
        """Return how a tensor is coded, and note it in the states and statistics of the layer."""
        layer, head_group, slots = self._layer_codecs, self._head_group, self._unsent_slots
        shape = rows.link_shape(values, slots)
        state, leader = layer.link_state(name, head_group), layer.leader_of(name, head_group)
        codec, lead = choose(layer, name, head_group, shape, values.dtype)
        error = None
        if not codec.is_exact:
            sent = leader.sent_values if leader and lead and lead.is_coded else None
            error = TensorError(name, layer.layer, layer.counts_errors, sent.error if sent else None)
        if lead:
            lead.prepare(state.sent, codec)
        active = active_tokens_for(layer, name, head_group, values, codec, slots) if codec.selects_tokens else None
        if leader is None:
            layer.note_sent(name, head_group, values, slots, error)
        layer.stats.exact_bytes += self._copies * math.prod(shape) * values.itemsize
        if layer.step.measures_yardsticks and error:
            measured = yardsticks.measure(values)
            energies = layer.errors.add([TensorError(each, layer.layer) for each in measured], values.device)
            for row, of_yardstick in zip(energies, measured.values(), strict=True):
                row.copy_(of_yardstick)
        how = values, state.sent, codec, active, _NO_PAYLOAD, slots, lead
        return _Part(*how, name=name, state=state, leader=leader, error=error)

    def _encode(self, new_buffer: Callable[[Sequence[int], torch.device], torch.Tensor]) -> torch.Tensor:
        """Encode all tensors into a buffer, and add it to the statistics."""
        first, layer = self._parts[0], self._layer_codecs
        of_tensors = tuple((part.name, part.codec, part.shape) for part in self._parts)
        self._layout = message_layout(of_tensors, first.values.dtype)
        device = first.values.device
        buffer = new_buffer((first.values.shape[0], self._layout.nbytes), device)
        layer.stats.sent_bytes += self._copies * first.shape[0] * self._layout.nbytes
        for part, mask, payload in zip(self._parts, self._layout.masks, self._layout.payloads, strict=True):
            part.payload = buffer.narrow(1, *payload)
            if part.active and part.name == selecting_name(part.name):
                pack_active(part.active, buffer.narrow(1, *mask), self._unsent_slots)
        energies = layer.errors.add([part.error for part in self._parts if part.error], device)
        coded_tensor.encode(self._parts, energies)
        if _carries_flag(buffer):
            are_finite = bool(energies[:, 0].isfinite().all())
            buffer[:, :FLAG_BYTES].fill_(_FINITE if are_finite else _NOT_FINITE)
        return buffer

    def decode(
        self,
        received: torch.Tensor,
        targets: Sequence[torch.Tensor],
        resend: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Decode the messages of other ranks into the targets, except for the local slots.

        If values of some rank are not finite, all ranks on these slow axes see its flag, since each sends its flag to
        all others, and send all values again without codecs.

        Args:
            received: messages, uint8 (P, bytes).
            targets: (P, G, H, T, D) for each tensor, written.
            resend: sends messages (P, bytes) once more.
        """
        self._read_selections(received)
        if _carries_flag(received) and received[:, :FLAG_BYTES].any():
            self._layer_codecs.stats.repeated += 1
            self._repeat_losslessly()
            received = resend(self._encode(_new_buffer))
        assert self._layout
        target_of = dict(zip(self._names, targets, strict=True))
        for part, payload in zip(self._parts, self._layout.payloads, strict=True):
            part.receive(target_of[part.name], received.narrow(1, *payload), self._local_slots)
            if part.codec.selects_tokens:
                part.active = self._layer_codecs.selections[selecting_name(part.name), self._head_group].received
        coded_tensor.decode(self._parts)
        for part in self._parts:  # after an error, the references of both ends may differ
            part.state.in_flight = False
        self._layer_codecs.drop_references(self._names, self._head_group)

    def _repeat_losslessly(self) -> None:
        """Send all tensors by themselves, and no differences to them in this step."""
        for part in self._parts:
            part.codec, part.active, part.error = EXACT, None, None
            part.lead = part.lead and part.lead._replace(is_coded=False)
            part.state.drop_kept()

    def _read_selections(self, received: torch.Tensor) -> None:
        """Read the token masks of other ranks, before a second message without them may replace the first.

        Q and K may use V's selection while their own message is in flight.
        """
        assert self._layout
        for part, mask in zip(self._parts, self._layout.masks, strict=True):
            if part.codec.selects_tokens and part.name == selecting_name(part.name):
                _, groups, _, tokens, _ = part.shape
                how = groups, tokens, part.codec.num_active(tokens), self._local_slots
                active = unpack_active(received.narrow(1, *mask), *how)
                self._layer_codecs.selections[part.name, self._head_group].received = active


def _new_buffer(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, device=device)


def _carries_flag(buffer: torch.Tensor) -> bool:
    """Return whether messages on this device have a valid flag."""
    return not devices.capabilities(buffer.device.type).is_asynchronous
