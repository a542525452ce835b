"""The exchange by codecs: exact along fast axes, encoded along slow ones.

What a rank holds for others goes along the fast axes first, as it is. What then has to cross slow ones is encoded once,
by the rank that puts it there, forwarded as it is through further slow axes, and decoded where it arrives. So
references live at the two ends of the slow way: one for each place on the slow axes that is not the rank's own.

Sizes in shapes: S places on slow axes, F on fast ones; n heads, s tokens and D head dim of what one rank holds for
another; B batch.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch

from xfuser_cocodiff import kernels
from xfuser_cocodiff.codec import codecs
from xfuser_cocodiff.codec.codecs import EXACT, Codec, Loss
from xfuser_cocodiff.codec.layer_codecs import LayerCodecs, Still, Wire, active_for, codec_for, is_finite
from xfuser_cocodiff.codec.slow_way import SlowWay
from xfuser_cocodiff.exchange.head_group import HeadGroup
from xfuser_cocodiff.exchange.lane import Handle
from xfuser_cocodiff.exchange.mesh import Mesh
from xfuser_cocodiff.exchange.traffic import Label
from xfuser_cocodiff.kernels import rows
from xfuser_cocodiff.kernels.rows import Active
from xfuser_cocodiff.machine import device as devices

T = TypeVar("T")


_FLAG_BYTES, _FINITE, _NOT_FINITE = 1, 0, 1
"""In front of a message between CPUs: whether all values of its sender are finite. Nobody reads it on an accelerator,
where the host would have to wait, and nobody writes it."""


class _Sent(NamedTuple):
    """What is known of an exchange between its encoding and its end."""

    split: list[torch.Tensor]
    """(S, F, B, n, s, D) each."""
    codecs: list[Codec]
    still: list[Still | None]
    """Of each, tokens that are not sent."""
    message: torch.Tensor
    """uint8 (S, bytes); nothing is written for this rank's own place."""


def send(
    pieces: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    mesh: Mesh,
    layer_codecs: LayerCodecs,
    label: Label,
    head_group: HeadGroup,
    result: T,
) -> Handle[T]:
    """Start an exchange.

    Args:
        pieces: by destination, (*way.shape, B, n, s, D) each, all of one dtype.
        targets: by source, of the same shapes; written when the handle is waited for.
        mesh: over all axes.
        layer_codecs: how to encode; V is encoded before Q and K of the same head group.
        label: what it is: a letter for each piece, which is q, k, v or o.
        head_group: of the heads.
        result: what waiting returns.
    """
    way, names = layer_codecs.way, label.what
    split = [way.split(piece) for piece in pieces]

    def end(sent: _Sent, received: torch.Tensor) -> T:
        _receive(received, sent, targets, names, layer_codecs, head_group)
        return result

    if way.fast is None:
        sent = _encoded(split, names, layer_codecs, head_group)
        plan = way.slow.policy.choose(sent.message.nbytes)
        message = sent.message.view(*plan.shape, -1)
        return way.slow.post(message, plan, label, lambda received: end(sent, received))
    span = mesh.traffic.span(label, pieces[0].device)

    def travel() -> tuple[_Sent, torch.Tensor]:
        with span.travels():
            sent = _encoded(_along_fast_axes(split, way), names, layer_codecs, head_group)
            return sent, _along_slow_axes(sent.message, way)

    return mesh.lane.start(str(label), travel, lambda arrived: end(*arrived), span.holds)


def _along_fast_axes(split: list[torch.Tensor], way: SlowWay) -> list[torch.Tensor]:
    """Exchange (S, F, B, n, s, D) along F, as it is."""
    turned = [piece.transpose(0, 1) for piece in split]
    sizes = [math.prod(piece.shape[1:]) for piece in turned]
    message = turned[0].new_empty(len(turned[0]), sum(sizes))
    for room, piece in zip(message.split(sizes, 1), turned, strict=True):
        kernels.move(room.unflatten(1, piece.shape[1:]), piece)
    plan = way.fast.policy.choose(message.nbytes)
    parts = way.fast.all_to_all(message.view(*plan.shape, -1), plan).reshape(message.shape).split(sizes, 1)
    return [found.unflatten(1, piece.shape[1:]).transpose(0, 1) for found, piece in zip(parts, turned, strict=True)]


def _along_slow_axes(message: torch.Tensor, way: SlowWay) -> torch.Tensor:
    plan = way.slow.policy.choose(message.nbytes)
    return way.slow.all_to_all(message.view(*plan.shape, -1), plan)


def _encoded(split: list[torch.Tensor], names: str, layer_codecs: LayerCodecs, head_group: HeadGroup) -> _Sent:
    """Encode what goes to other places on the slow axes."""
    way, order = layer_codecs.way, _encoding_order(names)
    values = [piece.flatten(1, 2) for piece in split]  # (S, F * B, n, s, D)
    wires = [layer_codecs.wire(name, head_group) for name in names]
    used: dict[int, Codec] = {}
    choices: dict[int, Active | None] = {}
    losses: list[Loss | None] = []
    for index in order:
        name, wire, whole = names[index], wires[index], values[index]
        rest = wire.rest_of(whole)
        used[index] = codec_for(layer_codecs, name, head_group, _to_others(rest, way), whole.dtype)
        if used[index].owes_nothing:
            wire.send_all()
            if layer_codecs.owes_nothing or not layer_codecs.codecs[name].is_exact:  # else it is never coded
                wire.marks, wire.looks = codecs.fingerprint(rows.away(whole, way.here)), _LOOKS
        else:
            losses += _look_for_still(wire, whole, way)
            values[index] = rest
        wire.under_way = True
        if values[index].numel():
            choices[index] = active_for(layer_codecs, name, head_group, values[index], used[index], way.here)
        layer_codecs.account.exact_bytes += math.prod(_to_others(whole, way)) * whole.itemsize
    codecs_of = [used[index] for index in range(len(names))]
    message, flag, rooms = _message(values, names, codecs_of, layer_codecs)
    for index, (choice, payload) in zip(order, rooms, strict=True):
        if not values[index].numel():
            continue
        active, wire = choices[index], wires[index]
        if choice.nbytes and active:
            codecs.pack_choice(active, choice, way.here)
        losses.append(codecs.encode(values[index], wire.sent, used[index], active, payload, way.here))
    known = [loss for loss in losses if loss]
    layer_codecs.account.losses += known
    if not devices.of(message.device.type).queues:
        flag.fill_(_FINITE if all(map(is_finite, known)) else _NOT_FINITE)
    return _Sent(split, codecs_of, [wire.still for wire in wires], message)


_LOOKS = 2
"""Exchanges that show what does not change: O, which comes of what the first two steps left, stays a step later."""


def _look_for_still(wire: Wire, values: torch.Tensor, way: SlowWay) -> list[Loss]:
    """See which tokens do not change, in the exchange after one that needed no reference; and later, that they do not.
    If they do, that is a loss that is not finite, and mended like others."""
    others = rows.away(values, way.here)
    if wire.still is None:
        if wire.marks is not None:
            before, wire.marks = wire.marks, codecs.fingerprint(others)
            wire.unchanged = codecs.first_unchanged(before, wire.marks)
        return []
    changed = (codecs.fingerprint(others[:, :, :, : wire.still.tokens]) != wire.marks).any()
    return [Loss(torch.where(changed, math.nan, 0.0), torch.zeros_like(changed, dtype=torch.float32))]


def _to_others(values: torch.Tensor, way: SlowWay) -> tuple[int, ...]:
    """The shape (L, G, H, T, D) of what goes to other places of values (S, G, H, T, D)."""
    return len(way.others), *values.shape[1:]


_Rooms = list[tuple[torch.Tensor, torch.Tensor]]
"""Of a message, for each tensor in the order of encoding: for its choice of tokens, and its values; uint8 (S, n)."""


def _message(
    values: list[torch.Tensor], names: str, used: list[Codec], layer_codecs: LayerCodecs
) -> tuple[torch.Tensor, torch.Tensor, _Rooms]:
    """A message (S, bytes) with nothing in it, which counts as sent, and its flag and rooms."""
    way, sizes = layer_codecs.way, _sizes(values, names, used, layer_codecs.way)
    message = values[0].new_empty(way.places, sum(map(codecs.aligned, sizes)), dtype=torch.uint8)
    layer_codecs.account.sent_bytes += len(way.others) * message.shape[1]
    return message, *_sections(message, sizes)


def _sizes(values: list[torch.Tensor], names: str, used: list[Codec], way: SlowWay) -> list[int]:
    """Bytes of the sections of a message for one place: its flag, and for each tensor, in the order of encoding, its
    choice of tokens, perhaps none, and its values."""
    sizes = [_FLAG_BYTES]
    for index in _encoding_order(names):
        sizes += codecs.section_bytes(used[index], names[index], _to_others(values[index], way), values[index].dtype)
    return sizes


def _sections(message: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, _Rooms]:
    """The flag and the rooms of a message, as views."""
    with_gaps = [each for size in sizes for each in (size, codecs.aligned(size) - size)]
    flag, *rooms = message.split(with_gaps, 1)[::2]
    return flag, list(zip(rooms[::2], rooms[1::2], strict=True))


def _receive(
    received: torch.Tensor,
    sent: _Sent,
    targets: Sequence[torch.Tensor],
    names: str,
    layer_codecs: LayerCodecs,
    head_group: HeadGroup,
) -> None:
    """Write to the targets what came from other places and what came from this rank's own."""
    way = layer_codecs.way
    received = received.reshape(way.places, -1)
    landings = [way.landing(target) for target in targets]
    for (landing, _), piece in zip(landings, sent.split, strict=True):
        kernels.move(landing[way.here], piece[way.here].flatten(0, 1))
    rooms = [landing for landing, _ in landings]
    flags = received[:, :_FLAG_BYTES]  # of others, and of this rank
    if not devices.of(received.device.type).queues and bool(flags.any()):
        _repeat(sent, rooms, names, layer_codecs, head_group)
    else:
        _decode(received, sent.codecs, _rests(rooms, sent.still, way), names, layer_codecs, head_group)
    for (landing, is_target), target, piece in zip(landings, targets, sent.split, strict=True):
        if not is_target:
            kernels.move(target, way.joined(landing.view(piece.shape)))


def _rests(landings: list[torch.Tensor], still: list[Still | None], way: SlowWay) -> list[torch.Tensor]:
    """What is still to be written to (S, F * B, n, s, D) each once tokens that are not sent have been."""
    rests = []
    for landing, kept in zip(landings, still, strict=True):
        if kept:
            rows.put_away(landing[:, :, :, : kept.tokens], kept.received, way.here)
        rests.append(landing[:, :, :, kept.tokens :] if kept else landing)
    return rests


def _decode(
    message: torch.Tensor,
    used: list[Codec],
    landings: list[torch.Tensor],
    names: str,
    layer_codecs: LayerCodecs,
    head_group: HeadGroup,
) -> None:
    """Write what other places have encoded, uint8 (S, bytes), to (S, F * B, n, s, D) each."""
    here = layer_codecs.way.here
    _, rooms = _sections(message, _sizes(landings, names, used, layer_codecs.way))
    for index, (choice, payload) in zip(_encoding_order(names), rooms, strict=True):
        name, landing, codec, active = names[index], landings[index], used[index], None
        layer_codecs.wire(name, head_group).under_way = False
        if not landing.numel():
            continue
        if codec.share < 1 and name in codecs.CHOOSING:
            groups, tokens = landing.shape[1], landing.shape[codecs.TOKENS]
            active = codecs.unpack_choice(choice, groups, tokens, codec.active(tokens), here)
            layer_codecs.choices[name, head_group].received = active
        elif codec.share < 1:
            active = layer_codecs.choices["v", head_group].received
        codecs.decode(payload, layer_codecs.wire(name, head_group).received, codec, active, landing, here)


def _repeat(
    sent: _Sent, landings: list[torch.Tensor], names: str, layer_codecs: LayerCodecs, head_group: HeadGroup
) -> None:
    """Exchange the values as they are: some of them, of some rank on these slow axes, are not finite, or are not sent
    although they have changed.

    Every one of these ranks has seen that, since each tells all others.
    """
    way = layer_codecs.way
    layer_codecs.account.repeated += 1
    values, exact = [piece.flatten(1, 2) for piece in sent.split], [EXACT] * len(names)
    message, _, rooms = _message(values, names, exact, layer_codecs)
    for index, (_, payload) in zip(_encoding_order(names), rooms, strict=True):
        wire = layer_codecs.wire(names[index], head_group)
        wire.send_all()
        if wire.unchanged is not None:  # other ranks know nothing of this, and agree with this one
            wire.unchanged.zero_()
        codecs.encode(values[index], wire.sent, EXACT, None, payload, way.here)
    received = way.slow.lane.run(lambda: _along_slow_axes(message, way))
    _decode(received.reshape(way.places, -1), exact, landings, names, layer_codecs, head_group)


def _encoding_order(names: str) -> list[int]:
    """V first: it chooses for Q and K."""
    return sorted(range(len(names)), key=lambda index: names[index] != "v")
