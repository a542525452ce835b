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

from xfuser_cocodiff import codec as codecs
from xfuser_cocodiff import kernels
from xfuser_cocodiff.codec import EXACT, Codec, Loss, Reference
from xfuser_cocodiff.collectives import Mesh
from xfuser_cocodiff.lane import Handle
from xfuser_cocodiff.part import Part
from xfuser_cocodiff.slow_way import SlowWay
from xfuser_cocodiff.traffic import Label

T = TypeVar("T")

_FLAG_BYTES, _NOT_FINITE = 1, 1
"""In front of a message: whether all values of its sender are finite."""


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

    tokens: int
    """Of which they were chosen."""
    sent: torch.Tensor
    received: torch.Tensor | None = None


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
    payload: torch.Tensor
    """uint8 (S, bytes)."""


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
        plan = way.slow.choose(sent.payload.nbytes)
        message = sent.payload.view(*plan.shape, -1)
        return way.slow.post(message, plan, label, lambda received: end(sent, received))
    span = mesh.traffic.span(label, pieces[0].device)

    def travel() -> tuple[_Sent, torch.Tensor]:
        with span.travels():
            sent = _coded(_along_fast_axes(parted, way), names, coding, part)
            return sent, _along_slow_axes(sent.payload, way)

    return mesh.lane.start(str(label), travel, lambda arrived: end(*arrived), span.holds)


def _along_fast_axes(parted: list[torch.Tensor], way: SlowWay) -> list[torch.Tensor]:
    """Exchange (S, F, B, n, s, D) along F, as it is."""
    turned = [piece.transpose(0, 1) for piece in parted]
    message = torch.cat([piece.flatten(1) for piece in turned], 1)
    plan = way.fast.choose(message.nbytes)
    received = way.fast.all_to_all(message.view(*plan.shape, -1), plan).reshape(message.shape)
    parts = received.split([math.prod(piece.shape[1:]) for piece in turned], 1)
    return [found.unflatten(1, piece.shape[1:]).transpose(0, 1) for found, piece in zip(parts, turned, strict=True)]


def _along_slow_axes(payload: torch.Tensor, way: SlowWay) -> torch.Tensor:
    plan = way.slow.choose(payload.nbytes)
    return way.slow.all_to_all(payload.view(*plan.shape, -1), plan)


def _coded(parted: list[torch.Tensor], names: str, coding: Coding, part: Part) -> _Sent:
    """Code what goes to other places on the slow axes."""
    way = coding.way
    used: dict[int, Codec] = {}
    payloads: list[torch.Tensor] = []
    losses: list[Loss] = []
    for index in _coding_order(names):
        name, (values, here) = names[index], _to_code(parted[index], way)
        shape = len(way.others), *values.shape[1:]
        codec = used[index] = coded_by(coding, name, part, shape, values.dtype)
        wire = coding.wire(name, part)
        wire.under_way = True
        chosen = chosen_of(coding, name, part, values, codec, here)
        if chosen is not None and name in codecs.CHOOSING:
            payloads.append(codecs.pack_choice(chosen, values.shape[codecs.TOKENS]))
        payload, loss = codecs.encode(values, wire.sent, codec, chosen, here)
        payloads.append(payload)
        if loss:
            losses.append(loss)
        coding.account.exact_bytes += math.prod(shape) * values.itemsize
    coding.account.losses += losses
    message = _to_others(payloads, coding, _FLAG_BYTES)
    if message.device.type == "cpu" and not all(is_finite(loss) for loss in losses):
        message[:, 0] = _NOT_FINITE
    return _Sent(parted, [used[index] for index in range(len(names))], message)


def _to_code(piece: torch.Tensor, way: SlowWay) -> tuple[torch.Tensor, int | None]:
    """A piece (S, F, B, n, s, D) as (P, F * B, n, s, D), and which of P is this rank's own, if it is among them."""
    if kernels.is_fused(piece.device):
        return piece.flatten(1, 2), way.here
    return kernels.away(piece, way.here).flatten(1, 2), None


def _to_others(payloads: list[torch.Tensor], coding: Coding, lead: int = 0) -> torch.Tensor:
    """A message (S, lead + bytes) with nothing for this rank's own place, which counts as sent."""
    way, sizes = coding.way, [payload.shape[1] for payload in payloads]
    message = payloads[0].new_zeros(way.places, lead + sum(sizes))
    for place, payload in zip(message[:, lead:].split(sizes, 1), payloads, strict=True):
        kernels.put_away(place, payload, way.here)
    coding.account.sent_bytes += len(way.others) * message.shape[1]
    return message


def _receive(
    received: torch.Tensor, sent: _Sent, targets: Sequence[torch.Tensor], names: str, coding: Coding, part: Part
) -> None:
    """Write to the targets what came from other places and what came from this rank's own."""
    way = coding.way
    received = received.reshape(way.places, -1)
    landings = [way.landing(target) for target in targets]
    for (landing, _), piece in zip(landings, sent.parted, strict=True):
        landing[way.here] = piece[way.here].flatten(0, 1)
    rooms = [landing for landing, _ in landings]
    if received.device.type == "cpu" and bool(received[:, 0].any()):  # of others, and this rank's own; see Account
        _repeat(sent, rooms, names, coding, part)
    else:
        _decode(received[:, _FLAG_BYTES:], sent, rooms, names, coding, part)
    for (landing, is_target), target, piece in zip(landings, targets, sent.parted, strict=True):
        if not is_target:
            target.copy_(way.joined(landing.view(piece.shape)))


def _decode(
    coded: torch.Tensor, sent: _Sent, landings: list[torch.Tensor], names: str, coding: Coding, part: Part
) -> None:
    """Write what other places have coded, uint8 (S, bytes), to (S, F * B, n, s, D) each."""
    way = coding.way
    coded = kernels.away(coded, way.here)
    for index in _coding_order(names):
        name, landing, codec = names[index], landings[index], sent.codecs[index]
        shape = len(way.others), *landing.shape[1:]
        groups, tokens, chosen = shape[1], shape[codecs.TOKENS], None
        if codec.share < 1:
            if name in codecs.CHOOSING:
                size = codecs.choice_bytes(groups, tokens)
                packed, coded = coded[:, :size], coded[:, size:]
                chosen = codecs.unpack_choice(packed, groups, tokens, codec.active(tokens))
                coding.choices[name, part].received = chosen
            else:
                chosen = coding.choices["v", part].received
        size = codec.payload_bytes(shape, landing.dtype)
        payload, coded = coded[:, :size], coded[:, size:]
        codecs.decode(payload, coding.wire(name, part).received, codec, chosen, landing, way.here)
        coding.wire(name, part).under_way = False


def _repeat(sent: _Sent, landings: list[torch.Tensor], names: str, coding: Coding, part: Part) -> None:
    """Exchange the values as they are: some of them, of some rank on these slow axes, are not finite.

    Every one of these ranks has seen that, since each tells all others.
    """
    way = coding.way
    coding.account.repeated += 1
    exact = sent._replace(codecs=[replace(EXACT, predictor=codec.predictor) for codec in sent.codecs])
    payloads = []
    for index in _coding_order(names):
        values, here = _to_code(sent.parted[index], way)
        reference = coding.wire(names[index], part).sent
        payloads.append(codecs.encode(values, reference, exact.codecs[index], None, here)[0])
    message = _to_others(payloads, coding)
    received = way.slow.lane.run(lambda: _along_slow_axes(message, way))
    _decode(received.reshape(way.places, -1), exact, landings, names, coding, part)
    for name in names:  # what is not finite is no reference for later values
        wire = coding.wire(name, part)
        wire.sent.mend()
        wire.received.mend()


def coded_by(coding: Coding, name: str, part: Part, shape: Sequence[int], dtype: torch.dtype) -> Codec:
    """How a tensor (L, G, H, T, D) travels: exactly while there is no reference, where the last exchange never ended,
    or where it cannot be packed; with all tokens where V has made no choice for it.

    Depends on shapes and on what was sent before, which are the same on every rank.
    """
    codec, wire = coding.codecs[name], coding.wire(name, part)
    packs = codec.bits is None or shape[-1] * codec.bits % 8 == 0
    if not packs or wire.under_way or not wire.sent.fits(shape, dtype):
        return replace(EXACT, predictor=codec.predictor)
    if codec.share < 1 and name not in codecs.CHOOSING:
        chosen = coding.choices.get(("v", part))
        if chosen is None or chosen.tokens != shape[codecs.TOKENS]:
            return replace(codec, share=1.0)
    return codec


def chosen_of(
    coding: Coding, name: str, part: Part, values: torch.Tensor, codec: Codec, here: int | None = None
) -> torch.Tensor | None:
    """The tokens that are sent: a choice made here, or V's; None stands for all."""
    if codec.share == 1:
        return None
    if name in codecs.CHOOSING:
        chosen = codecs.choose(values, coding.wire(name, part).sent, codec, coding.seed, here)
        coding.choices[name, part] = Choice(values.shape[codecs.TOKENS], chosen)
        return chosen
    return coding.choices["v", part].sent


def is_finite(loss: Loss) -> bool:
    """Whether the values were: the difference of infinite values is not a number."""
    return bool(loss.lacking.isfinite())


def _coding_order(names: str) -> list[int]:
    """V first: it chooses for Q and K."""
    return sorted(range(len(names)), key=lambda index: names[index] != "v")
