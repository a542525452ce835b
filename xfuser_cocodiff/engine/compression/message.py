"""Messages: the tensors of one collective, encoded into one buffer per slot at the sender and decoded at the receiver.

A message has a flag, and for each tensor a token mask, which may be empty, and a payload. Each section is padded.

Sizes in shapes: P slots, L of them of other ranks; G groups of tokens, H heads, T tokens, D head dim.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.codec import coded_tensor, rows, yardsticks
from xfuser_cocodiff.engine.codec.active_tokens import ActiveTokens, pack_active, unpack_active
from xfuser_cocodiff.engine.codec.codec import EXACT, Codec, aligned, section_bytes
from xfuser_cocodiff.engine.codec.coded_tensor import CodedTensor
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.layer_codecs import (
    Joint,
    LayerCodecs,
    LinkState,
    active_tokens_for,
    codec_for,
    is_finite,
    joint_for,
    selecting_name,
)
from xfuser_cocodiff.engine.topology import devices

WIRE_FORMAT = 4
"""Version of the messages; raised when bytes or the arithmetic of both ends change. All ranks must have the same."""
_FLAG_BYTES, _FINITE, _NOT_FINITE = 1, 0, 1
"""Flag at the start of a message: whether all values of its sender are finite. On accelerators it is neither written
nor read, since the host would have to wait."""


class _Section(NamedTuple):
    """Bytes of one tensor in a buffer."""

    name: str
    """Name of the tensor: its letter, and for branches that follow in the batch their number."""
    mask: torch.Tensor
    """Token mask, uint8 (P, n); empty if the tensor selects no tokens."""
    payload: torch.Tensor
    """Encoded values, uint8 (P, n)."""


class Message:
    """The tensors of one collective, from encoding what is sent to decoding what has arrived.

    Args:
        label: a letter for each tensor, and the head group of the values.
        values: (P, G, H, T, D) each, by destination.
        layer_codecs: codecs and link states of the layer.
        local_slots: slots of this rank, which are skipped.
        samples: number of samples in the batch.
        copies: number of receivers that all get the same values; P is then 1 when encoding. None if each slot has
            values of its own.
    """

    def __init__(
        self,
        label: Label,
        values: Sequence[torch.Tensor],
        layer_codecs: LayerCodecs,
        local_slots: range,
        samples: int = 1,
        copies: int | None = None,
    ) -> None:
        self.names, self.values, self._samples = label.tensors, values, samples
        self._layer_codecs, self._head_group = layer_codecs, label.head_group
        self._local_slots, self._copies = local_slots, copies or 1
        self._unsent_slots = None if copies else local_slots
        # V first: it selects the active tokens of Q and K. A branch that leads others is before them.
        self._by_name = dict(sorted(self._branches_of(values).items(), key=lambda item: item[0][0] != "v"))
        self._links = rows.num_links(len(values[0]), self._unsent_slots)
        self._codecs: dict[str, Codec] = {}
        self._joints: dict[str, Joint | None] = {}

    def encode(self) -> torch.Tensor:
        """Choose codecs and active tokens, encode the values, and mark the link states as in flight.

        Returns:
            uint8 (P, bytes). Local slots have the flag only.
        """
        active: dict[str, ActiveTokens | None] = {}
        for name, values in self._by_name.items():
            shape = self._link_shape(values)
            of_tensor = self._layer_codecs, name, self._head_group
            self._codecs[name] = codec = codec_for(*of_tensor, shape, values.dtype)
            self._joints[name] = joint = joint_for(*of_tensor, shape, values.dtype, codec)
            lead = joint.at_sender() if joint else None
            if lead:
                lead.prepare(self._link_state(name).sent, codec)
            active[name] = active_tokens_for(*of_tensor, values, codec, self._unsent_slots, lead)
            self._layer_codecs.note_sent(name, self._head_group, values, self._unsent_slots)
            if self._layer_codecs.measures_yardsticks and not codec.is_exact:
                self._layer_codecs.stats.quant_errors += yardsticks.measure(values).items()
            self._layer_codecs.stats.exact_bytes += self._copies * math.prod(shape) * values.itemsize
        for name in self._by_name:
            self._link_state(name).in_flight = True
        buffer = self._encode_sections(active)
        for name in self._by_name:
            self._layer_codecs.release_sent(name, self._head_group)
        return buffer

    def _encode_sections(self, active: Mapping[str, ActiveTokens | None]) -> torch.Tensor:
        """Encode all tensors by their codecs into a new buffer, and add it to the statistics.

        Args:
            active: active tokens of each tensor; None or absent to send all.
        """
        buffer, stats = self._new_buffer(), self._layer_codecs.stats
        stats.sent_bytes += self._copies * self._links * buffer.shape[1]
        tensors: list[CodedTensor] = []
        for name, mask, payload in self._sections(buffer):
            tokens, joint = active.get(name), self._joints[name]
            if mask.nbytes and tokens:
                pack_active(tokens, mask, self._unsent_slots)
            link_state, lead = self._link_state(name), joint.at_sender() if joint else None
            how = link_state.sent, self._codecs[name], tokens, payload, self._unsent_slots, lead
            tensors.append(CodedTensor(self._by_name[name], *how, link_state.sent_values))
        errors = [
            (name[0], error) for name, error in zip(self._by_name, coded_tensor.encode(tensors), strict=True) if error
        ]
        stats.quant_errors += errors
        if _carries_flag(buffer):
            are_finite = all(is_finite(error) for _, error in errors)
            buffer[:, :_FLAG_BYTES].fill_(_FINITE if are_finite else _NOT_FINITE)
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
        if _carries_flag(received) and received[:, :_FLAG_BYTES].any():
            self._layer_codecs.stats.repeated += 1
            self._repeat_losslessly()
            received = resend(self._encode_sections({}))
        target_of = self._branches_of(targets)
        leads = {name: joint.at_receiver() if joint else None for name, joint in self._joints.items()}
        for name, lead in leads.items():
            if lead:
                lead.prepare(self._link_state(name).received, self._codecs[name])
        leading: list[CodedTensor] = []
        following: list[CodedTensor] = []
        for name, _, payload in self._sections(received):
            codec, link_state = self._codecs[name], self._link_state(name)
            link_state.in_flight = False
            active = self._received_tokens(name) if codec.selects_tokens else None
            how = link_state.received, codec, active, payload, self._local_slots, leads[name]
            (following if name[1:] else leading).append(CodedTensor(target_of[name], *how))
        for tensors in (leading, following):  # the values of a leading branch are added to those that follow it
            coded_tensor.decode(tensors)
        self._join_copies(targets, target_of)
        self._layer_codecs.drop_references(self._by_name, self._head_group)

    def _branches_of(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors (P, G, H, T, D) by name, those of each branch in the batch by itself."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in zip(self.names, tensors, strict=True):
            found |= self._layer_codecs.split_branches(name, tensor, self._samples)
        return found

    def _join_copies(self, targets: Sequence[torch.Tensor], target_of: Mapping[str, torch.Tensor]) -> None:
        """Write to the targets what was decoded of each branch, where that was to copies."""
        for name, target in zip(self.names, targets, strict=True):
            parts = [part for each, part in target_of.items() if each[0] == name]
            if any(part.untyped_storage().data_ptr() != target.untyped_storage().data_ptr() for part in parts):
                target.copy_(self._layer_codecs.join_branches(parts, self._samples))

    def _repeat_losslessly(self) -> None:
        """Send all tensors by themselves, and no differences to them in this step."""
        for name, joint in self._joints.items():
            self._codecs[name], self._joints[name] = EXACT, joint and joint._replace(weight=0.0)
            self._link_state(name).drop_kept()

    def _read_selections(self, received: torch.Tensor) -> None:
        """Read the token masks of other ranks, before a second message without them may replace the first.

        Q and K may use V's selection while their own message is in flight.
        """
        for name, mask, _ in self._sections(received):
            if mask.nbytes:
                _, groups, _, tokens, _ = self._by_name[name].shape
                count = self._codecs[name].num_active(tokens)
                active = unpack_active(mask, groups, tokens, count, self._local_slots)
                self._layer_codecs.selections[name, self._head_group].received = active

    def _received_tokens(self, name: str) -> ActiveTokens | None:
        """Return the active tokens that other ranks send of a tensor."""
        return self._layer_codecs.selections[selecting_name(name), self._head_group].received

    def _link_state(self, name: str) -> LinkState:
        return self._layer_codecs.link_state(name, self._head_group)

    def _link_shape(self, values: torch.Tensor) -> tuple[int, ...]:
        """Return the shape (L, G, H, T, D) of the values that cross links."""
        return (self._links, *values.shape[1:])

    def _new_buffer(self) -> torch.Tensor:
        """Return a buffer uint8 (P, bytes) for all sections."""
        return self.values[0].new_empty(len(self.values[0]), sum(self._section_sizes()), dtype=torch.uint8)

    def _section_sizes(self) -> list[int]:
        """Return the bytes of each section of a slot's message, each followed by the bytes of its padding."""
        sizes = [_FLAG_BYTES]
        for name, values in self._by_name.items():
            sizes += section_bytes(self._codecs[name], name, self._link_shape(values), values.dtype)
        return [part for size in sizes for part in (size, aligned(size) - size)]

    def _sections(self, buffer: torch.Tensor) -> list[_Section]:
        """Return the sections of all tensors in a buffer (P, bytes), as views."""
        _, *views = buffer.split_with_sizes(self._section_sizes(), 1)[::2]
        return list(map(_Section, self._by_name, views[::2], views[1::2]))


def _carries_flag(buffer: torch.Tensor) -> bool:
    """Return whether messages on this device have a valid flag."""
    return not devices.capabilities(buffer.device.type).is_asynchronous
