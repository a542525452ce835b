"""Messages: tensors of one exchange, encoded into one buffer for each place that they go to, and decoded from there.

Sizes in shapes: P places, L of them that are not the rank's own; G groups of tokens, H heads, T tokens, D head dim.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from xfuser_cocodiff.codec import codecs
from xfuser_cocodiff.codec.codecs import EXACT, Codec, Loss
from xfuser_cocodiff.codec.layer_codecs import LayerCodecs, active_for, codec_for, is_finite
from xfuser_cocodiff.exchange.head_group import HeadGroup
from xfuser_cocodiff.kernels import rows
from xfuser_cocodiff.kernels.rows import Active
from xfuser_cocodiff.machine import device as devices

_FLAG_BYTES, _FINITE, _NOT_FINITE = 1, 0, 1
"""In front of a message between CPUs: whether all values of its sender are finite. Nobody reads it on an accelerator,
where the host would have to wait, and nobody writes it."""


class Ends(NamedTuple):
    """Where values go to, or come from."""

    places: int
    here: range | None = None
    """The rank's own, which are left out."""
    copies: int = 1
    """How often what is encoded for a place travels."""

    @property
    def others(self) -> int:
        """Places that are not the rank's own."""
        return rows.others(self.places, self.here)


class Sent(NamedTuple):
    """What is known of an exchange between its encoding and its end."""

    message: torch.Tensor
    """uint8 (P, bytes); nothing but the flag is written for this rank's own places."""
    codecs: list[Codec]


def encoded(
    values: Sequence[torch.Tensor], names: str, layer_codecs: LayerCodecs, head_group: HeadGroup, ends: Ends
) -> Sent:
    """Encode values (P, G, H, T, D) for other places.

    Args:
        values: of several tensors.
        names: a letter for each; V is encoded before Q and K of the same head group.
        layer_codecs: how.
        head_group: of the heads.
        ends: where they go to.
    """
    used: dict[int, Codec] = {}
    chosen: dict[int, Active | None] = {}
    for index in _encoding_order(names):
        name, tensor = names[index], values[index]
        used[index] = codec_for(layer_codecs, name, head_group, _to_others(tensor, ends), tensor.dtype)
        chosen[index] = active_for(layer_codecs, name, head_group, tensor, used[index], ends.here)
        layer_codecs.account.exact_bytes += ends.copies * math.prod(_to_others(tensor, ends)) * tensor.itemsize
    codecs_of = [used[index] for index in range(len(names))]
    message, flag, rooms = _message(values, names, codecs_of, layer_codecs, ends)
    losses: list[Loss] = []
    for index, (choice, payload) in zip(_encoding_order(names), rooms, strict=True):
        wire, active = layer_codecs.wire(names[index], head_group), chosen[index]
        wire.under_way = True
        if choice.nbytes and active:
            codecs.pack_choice(active, choice, ends.here)
        loss = codecs.encode(values[index], wire.sent, used[index], active, payload, ends.here)
        losses += [loss] if loss else []
    layer_codecs.account.losses += losses
    if not devices.of(message.device.type).queues:
        flag.fill_(_FINITE if all(map(is_finite, losses)) else _NOT_FINITE)
    return Sent(message, codecs_of)


def repeated(
    values: Sequence[torch.Tensor], names: str, layer_codecs: LayerCodecs, head_group: HeadGroup, ends: Ends
) -> Sent:
    """Values as they are: some of them, of some rank on these slow axes, are not finite. Every one of these ranks has
    seen that, since each tells all others."""
    layer_codecs.account.repeated += 1
    exact = [EXACT] * len(names)
    message, _, rooms = _message(values, names, exact, layer_codecs, ends)
    for index, (_, payload) in zip(_encoding_order(names), rooms, strict=True):
        wire = layer_codecs.wire(names[index], head_group)
        codecs.encode(values[index], wire.sent, EXACT, None, payload, ends.here)
    return Sent(message, exact)


def asks_again(received: torch.Tensor) -> bool:
    """Whether messages (P, bytes) are to be sent as they are, by the word of one of their senders."""
    return not devices.of(received.device.type).queues and bool(received[:, :_FLAG_BYTES].any())


def read_choices(
    received: torch.Tensor,
    sent: Sent,
    landings: Sequence[torch.Tensor],
    names: str,
    layer_codecs: LayerCodecs,
    head_group: HeadGroup,
    ends: Ends,
) -> None:
    """Read which tokens other places have chosen, before values are asked for again: Q and K go by V's choice, which
    the messages of a repeated exchange lack. For arguments see :func:`decode`."""
    _, rooms = _sections(received, _sizes(landings, names, sent.codecs, ends))
    for index, (choice, _) in zip(_encoding_order(names), rooms, strict=True):
        if choice.nbytes:
            (_, groups, _, tokens, _), codec = landings[index].shape, sent.codecs[index]
            active = codecs.unpack_choice(choice, groups, tokens, codec.active(tokens), ends.here)
            layer_codecs.choices[names[index], head_group].received = active


def decode(
    received: torch.Tensor,
    sent: Sent,
    landings: Sequence[torch.Tensor],
    names: str,
    layer_codecs: LayerCodecs,
    head_group: HeadGroup,
    ends: Ends,
) -> None:
    """Write what other places have encoded, but for the rank's own places.

    Args:
        received: messages, uint8 (P, bytes).
        sent: what this rank has sent, as all do.
        landings: room for the tensors, (P, G, H, T, D) each.
        names: their letters.
        layer_codecs: how.
        head_group: of the heads.
        ends: where they come from.
    """
    _, rooms = _sections(received, _sizes(landings, names, sent.codecs, ends))
    for index, (_, payload) in zip(_encoding_order(names), rooms, strict=True):
        name, codec, active = names[index], sent.codecs[index], None
        wire = layer_codecs.wire(name, head_group)
        wire.under_way = False
        if codec.chooses:
            active = layer_codecs.choices[name if name in codecs.CHOOSING else "v", head_group].received
        codecs.decode(payload, wire.received, codec, active, landings[index], ends.here)


def _to_others(values: torch.Tensor, ends: Ends) -> tuple[int, ...]:
    """The shape (L, G, H, T, D) of what goes to other places of values (P, G, H, T, D)."""
    return ends.others, *values.shape[1:]


_Rooms = list[tuple[torch.Tensor, torch.Tensor]]
"""Of a message, for each tensor in the order of encoding: for its choice of tokens, and its values; uint8 (P, n)."""


def _message(
    values: Sequence[torch.Tensor], names: str, used: list[Codec], layer_codecs: LayerCodecs, ends: Ends
) -> tuple[torch.Tensor, torch.Tensor, _Rooms]:
    """A message (P, bytes) with nothing in it, which counts as sent, and its flag and rooms."""
    sizes = _sizes(values, names, used, ends)
    message = values[0].new_empty(ends.places, sum(map(codecs.aligned, sizes)), dtype=torch.uint8)
    layer_codecs.account.sent_bytes += ends.copies * ends.others * message.shape[1]
    return message, *_sections(message, sizes)


def _sizes(values: Sequence[torch.Tensor], names: str, used: list[Codec], ends: Ends) -> list[int]:
    """Bytes of the sections of a message for one place: its flag, and for each tensor, in the order of encoding, its
    choice of tokens, perhaps none, and its values."""
    sizes = [_FLAG_BYTES]
    for index in _encoding_order(names):
        sizes += codecs.section_bytes(used[index], names[index], _to_others(values[index], ends), values[index].dtype)
    return sizes


def _sections(message: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, _Rooms]:
    """The flag and the rooms of a message, as views."""
    with_gaps = [each for size in sizes for each in (size, codecs.aligned(size) - size)]
    flag, *rooms = message.split_with_sizes(with_gaps, 1)[::2]
    return flag, list(zip(rooms[::2], rooms[1::2], strict=True))


@functools.cache
def _encoding_order(names: str) -> tuple[int, ...]:
    """V first: it chooses for Q and K."""
    return tuple(sorted(range(len(names)), key=lambda index: names[index] != "v"))
