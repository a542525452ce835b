"""The exchange by codecs: exact along fast axes, coded along slow ones.

What a rank holds for others goes along the fast axes first, as it is. What then has to cross slow ones is coded once,
by the rank that puts it there, forwarded as it is through further slow axes, and decoded where it arrives. So
references live at the two ends of the slow way: one for each place on the slow axes that is not the rank's own.

Sizes in shapes: S places on slow axes, F on fast ones; n heads, s tokens and D head dim of what one rank holds for
another; B batch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import torch

from xfuser_cocodiff import kernels
from xfuser_cocodiff.codec import codec as codecs
from xfuser_cocodiff.codec.codec import EXACT, Codec, Loss, Reference
from xfuser_cocodiff.codec.slow_way import SlowWay
from xfuser_cocodiff.exchange.collectives import Mesh
from xfuser_cocodiff.exchange.lane import Handle
from xfuser_cocodiff.exchange.part import Part
from xfuser_cocodiff.exchange.traffic import Label
from xfuser_cocodiff.kernels.rows import Active
from xfuser_cocodiff.machine import device as devices

T = TypeVar("T")

_FLAG_BYTES, _FINITE, _NOT_FINITE = 1, 0, 1
"""In front of a message between CPUs: whether all values of its sender are finite. Nobody reads it on an accelerator,
where the host would have to wait, and nobody writes it."""


@dataclass
class Wire:
    """A part of a tensor of one layer, as both ends of this rank's links know it."""

    sent: Reference
    received: Reference
    under_way: bool = False
    """Whether an exchange has begun and not ended: the ends do not agree until it has."""

    def squeeze(self, way: SlowWay | None) -> None:
        """Keep references in 8 bits from now on; the other ends must do the same between the same two exchanges.

        Args:
            way: which they are for; None among virtual ranks.
        """
        if way and way.fast:  # then values are coded in the lane, and on its stream, where there is one
            way.fast.lane.start("squeezing references", self.sent.squeeze).wait()
        else:
            self.sent.squeeze()
        self.received.squeeze()


@dataclass
class Choice:
    """Active tokens of one step: those that this rank sends, and those that it gets."""

    sent: Active
    received: Active | None = None


@dataclass
class Account:
    """What codecs saved and what they left out."""

    sent_bytes: int = 0
    """Sent to other places on slow axes, by this rank as the first."""
    exact_bytes: int = 0
    """What that would have been without codecs."""
    losses: list[Loss] = field(default_factory=list)
    """What receivers lack, of each tensor that was not sent as it is. They stay on their device until somebody asks."""
    repeated: int = 0
    """Exchanges that were repeated exactly, since there were values that are not finite. On an accelerator the host
    would have to wait to know; the next step is exact there instead."""


@dataclass
class Coding:
    """How the tensors of a layer travel at one step."""

    way: SlowWay | None
    """None among virtual ranks."""
    codecs: Mapping[str, Codec]
    """For each of q, k, v and o; those of Q, K and V send as many tokens."""
    wires: dict[tuple[str, Part], Wire]
    """Of the layer; they outlive the step."""
    account: Account
    """Where it is all counted."""
    seed: int = 0
    """For choices by chance: another at each step."""
    compact: bool = False
    """Whether references are kept in 8 bits."""
    choices: dict[tuple[str, Part], Choice] = field(default_factory=dict)
    """Active tokens that V and O have chosen at this step."""

    @property
    def is_exact(self) -> bool:
        """Whether everything travels as it is."""
        return all(codec.is_exact for codec in self.codecs.values())

    def wire(self, name: str, part: Part) -> Wire:
        """The wire of a part of a tensor."""
        if (name, part) not in self.wires:
            self.wires[name, part] = Wire(Reference(self.compact), Reference(self.compact))
        return self.wires[name, part]


class _Sent(NamedTuple):
    """What is known of an exchange between its coding and its end."""

    parted: list[torch.Tensor]
    """(S, F, B, n, s, D) each."""
    codecs: list[Codec]
    message: torch.Tensor
    """uint8 (S, bytes); nothing is written for this rank's own place."""


def send(
    pieces: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    mesh: Mesh,
    coding: Coding,
    label: Label,
    part: Part,
    result: T,
) -> Handle[T]:
    """Start an exchange.

    Args:
        pieces: by destination, (*way.shape, B, n, s, D) each, all of one dtype.
        targets: by source, of the same shapes; written when the handle is waited for.
        mesh: over all axes.
        coding: how to code; V is coded before Q and K of the same part.
        label: what it is: a letter for each piece, which is q, k, v or o.
        part: of the heads.
        result: what waiting returns.
    """
    way, names = coding.way, label.what
    parted = [way.parted(piece) for piece in pieces]

    def end(sent: _Sent, received: torch.Tensor) -> T:
        _receive(received, sent, targets, names, coding, part)
        return result

    if way.fast is None:
        sent = _coded(parted, names, coding, part)
        plan = way.slow.choose(sent.message.nbytes)
        message = sent.message.view(*plan.shape, -1)
        return way.slow.post(message, plan, label, lambda received: end(sent, received))
    span = mesh.traffic.span(label, pieces[0].device)

    def travel() -> tuple[_Sent, torch.Tensor]:
        with span.travels():
            sent = _coded(_along_fast_axes(parted, way), names, coding, part)
            return sent, _along_slow_axes(sent.message, way)

    return mesh.lane.start(str(label), travel, lambda arrived: end(*arrived), span.holds)


def _along_fast_axes(parted: list[torch.Tensor], way: SlowWay) -> list[torch.Tensor]:
    """Exchange (S, F, B, n, s, D) along F, as it is."""
    turned = [piece.transpose(0, 1) for piece in parted]
    sizes = [math.prod(piece.shape[1:]) for piece in turned]
    message = turned[0].new_empty(len(turned[0]), sum(sizes))
    for room, piece in zip(message.split(sizes, 1), turned, strict=True):
        kernels.move(room.unflatten(1, piece.shape[1:]), piece)
    plan = way.fast.choose(message.nbytes)
    parts = way.fast.all_to_all(message.view(*plan.shape, -1), plan).reshape(message.shape).split(sizes, 1)
    return [found.unflatten(1, piece.shape[1:]).transpose(0, 1) for found, piece in zip(parts, turned, strict=True)]


def _along_slow_axes(message: torch.Tensor, way: SlowWay) -> torch.Tensor:
    plan = way.slow.choose(message.nbytes)
    return way.slow.all_to_all(message.view(*plan.shape, -1), plan)


def _coded(parted: list[torch.Tensor], names: str, coding: Coding, part: Part) -> _Sent:
    """Code what goes to other places on the slow axes."""
    way, order = coding.way, _coding_order(names)
    values = [piece.flatten(1, 2) for piece in parted]  # (S, F * B, n, s, D)
    used: dict[int, Codec] = {}
    choices: dict[int, Active | None] = {}
    for index in order:
        name, shape = names[index], _to_others(values[index], way)
        used[index] = coded_by(coding, name, part, shape, values[index].dtype)
        coding.wire(name, part).under_way = True
        choices[index] = chosen_of(coding, name, part, values[index], used[index], way.here)
        coding.account.exact_bytes += math.prod(shape) * values[index].itemsize
    codecs_of = [used[index] for index in range(len(names))]
    message, flag, rooms = _message(values, names, codecs_of, coding)
    losses = []
    for index, (choice, payload) in zip(order, rooms, strict=True):
        active = choices[index]
        if choice.nbytes and active:
            codecs.pack_choice(active, choice, way.here)
        wire = coding.wire(names[index], part)
        losses.append(codecs.encode(values[index], wire.sent, used[index], active, payload, way.here))
    known = [loss for loss in losses if loss]
    coding.account.losses += known
    if not devices.of(message.device.type).queues:
        flag.fill_(_FINITE if all(map(is_finite, known)) else _NOT_FINITE)
    return _Sent(parted, codecs_of, message)


def _to_others(values: torch.Tensor, way: SlowWay) -> tuple[int, ...]:
    """The shape (L, G, H, T, D) of what goes to other places of values (S, G, H, T, D)."""
    return len(way.others), *values.shape[1:]


_Rooms = list[tuple[torch.Tensor, torch.Tensor]]
"""Of a message, for each tensor in the order of coding: for its choice of tokens, and for its values; uint8 (S, n)."""


def _message(
    values: list[torch.Tensor], names: str, used: list[Codec], coding: Coding
) -> tuple[torch.Tensor, torch.Tensor, _Rooms]:
    """A message (S, bytes) with nothing in it, which counts as sent, and its flag and rooms."""
    way, sizes = coding.way, _sizes(values, names, used, coding.way)
    message = values[0].new_empty(way.places, sum(map(codecs.aligned, sizes)), dtype=torch.uint8)
    coding.account.sent_bytes += len(way.others) * message.shape[1]
    return message, *_parts(message, sizes)


def _sizes(values: list[torch.Tensor], names: str, used: list[Codec], way: SlowWay) -> list[int]:
    """Bytes of the parts of a message for one place: its flag, and for each tensor, in the order of coding, its choice
    of tokens, perhaps none, and its values."""
    sizes = [_FLAG_BYTES]
    for index in _coding_order(names):
        sizes += codecs.part_bytes(used[index], names[index], _to_others(values[index], way), values[index].dtype)
    return sizes


def _parts(message: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, _Rooms]:
    """The flag and the rooms of a message, as views."""
    with_gaps = [each for size in sizes for each in (size, codecs.aligned(size) - size)]
    flag, *rooms = message.split(with_gaps, 1)[::2]
    return flag, list(zip(rooms[::2], rooms[1::2], strict=True))


def _receive(
    received: torch.Tensor, sent: _Sent, targets: Sequence[torch.Tensor], names: str, coding: Coding, part: Part
) -> None:
    """Write to the targets what came from other places and what came from this rank's own."""
    way = coding.way
    received = received.reshape(way.places, -1)
    landings = [way.landing(target) for target in targets]
    for (landing, _), piece in zip(landings, sent.parted, strict=True):
        kernels.move(landing[way.here], piece[way.here].flatten(0, 1))
    rooms = [landing for landing, _ in landings]
    flags = received[:, :_FLAG_BYTES]  # of others, and of this rank
    if not devices.of(received.device.type).queues and bool(flags.any()):
        _repeat(sent, rooms, names, coding, part)
    else:
        _decode(received, sent.codecs, rooms, names, coding, part)
    for (landing, is_target), target, piece in zip(landings, targets, sent.parted, strict=True):
        if not is_target:
            kernels.move(target, way.joined(landing.view(piece.shape)))


def _decode(
    message: torch.Tensor, used: list[Codec], landings: list[torch.Tensor], names: str, coding: Coding, part: Part
) -> None:
    """Write what other places have coded, uint8 (S, bytes), to (S, F * B, n, s, D) each."""
    here = coding.way.here
    _, rooms = _parts(message, _sizes(landings, names, used, coding.way))
    for index, (choice, payload) in zip(_coding_order(names), rooms, strict=True):
        name, landing, codec, active = names[index], landings[index], used[index], None
        if codec.share < 1 and name in codecs.CHOOSING:
            groups, tokens = landing.shape[1], landing.shape[codecs.TOKENS]
            active = codecs.unpack_choice(choice, groups, tokens, codec.active(tokens), here)
            coding.choices[name, part].received = active
        elif codec.share < 1:
            active = coding.choices["v", part].received
        codecs.decode(payload, coding.wire(name, part).received, codec, active, landing, here)
        coding.wire(name, part).under_way = False


def _repeat(sent: _Sent, landings: list[torch.Tensor], names: str, coding: Coding, part: Part) -> None:
    """Exchange the values as they are: some of them, of some rank on these slow axes, are not finite.

    Every one of these ranks has seen that, since each tells all others.
    """
    way = coding.way
    coding.account.repeated += 1
    values, exact = [piece.flatten(1, 2) for piece in sent.parted], [EXACT] * len(names)
    message, _, rooms = _message(values, names, exact, coding)
    for index, (_, payload) in zip(_coding_order(names), rooms, strict=True):
        codecs.encode(values[index], coding.wire(names[index], part).sent, EXACT, None, payload, way.here)
    received = way.slow.lane.run(lambda: _along_slow_axes(message, way))
    _decode(received.reshape(way.places, -1), exact, landings, names, coding, part)


def coded_by(coding: Coding, name: str, part: Part, shape: Sequence[int], dtype: torch.dtype) -> Codec:
    """How a tensor (L, G, H, T, D) travels: exactly while there is no reference, where the last exchange never ended,
    or where it cannot be packed; with all tokens where V has made no choice for it.

    Depends on shapes and on what was sent before, which are the same on every rank.
    """
    codec, wire = coding.codecs[name], coding.wire(name, part)
    packs = codec.bits is None or shape[-1] * codec.bits % 8 == 0
    if not packs or wire.under_way or not wire.sent.fits(shape, dtype):
        return EXACT  # nor is the change from what may be held now one that both ends know
    if codec.share < 1 and name not in codecs.CHOOSING:
        choice = coding.choices.get(("v", part))
        if choice is None or choice.sent.tokens != shape[codecs.TOKENS]:
            return replace(codec, share=1.0)
    return codec


def chosen_of(
    coding: Coding, name: str, part: Part, values: torch.Tensor, codec: Codec, here: int | None = None
) -> Active | None:
    """The tokens that are sent: a choice made here, or V's; None stands for all."""
    if codec.share == 1:
        return None
    if name in codecs.CHOOSING:
        chosen = codecs.choose(values, coding.wire(name, part).sent, codec, coding.seed, here)
        coding.choices[name, part] = Choice(chosen)
        return chosen
    return coding.choices["v", part].sent


def is_finite(loss: Loss) -> bool:
    """Whether the values were: the difference of infinite values is not a number."""
    return bool(loss.lacking.isfinite())


def _coding_order(names: str) -> list[int]:
    """V first: it chooses for Q and K."""
    return sorted(range(len(names)), key=lambda index: names[index] != "v")
