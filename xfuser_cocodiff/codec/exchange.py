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
from xfuser_cocodiff.codec import message as messages
from xfuser_cocodiff.codec.layer_codecs import LayerCodecs
from xfuser_cocodiff.codec.message import Ends, Sent
from xfuser_cocodiff.codec.slow_way import SlowWay
from xfuser_cocodiff.exchange.head_group import HeadGroup
from xfuser_cocodiff.exchange.lane import Handle
from xfuser_cocodiff.exchange.mesh import Mesh
from xfuser_cocodiff.exchange.traffic import Label

T = TypeVar("T")


class _UnderWay(NamedTuple):
    """An exchange between its encoding and its end."""

    split: list[torch.Tensor]
    """(S, F, B, n, s, D) each."""
    sent: Sent


def send(
    pieces: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    mesh: Mesh,
    layer_codecs: LayerCodecs,
    label: Label,
    head_group: HeadGroup,
    result: T,
    is_awaited: bool = False,
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
        is_awaited: whether the caller waits for it next.
    """
    way, names = layer_codecs.way, label.what
    split = [way.split(piece) for piece in pieces]

    def end(under_way: _UnderWay, received: torch.Tensor) -> T:
        _receive(received, under_way, targets, names, layer_codecs, head_group)
        return result

    if way.fast is None:
        under_way = _encoded(split, names, layer_codecs, head_group)
        plan = way.slow.policy.choose(under_way.sent.message.nbytes)
        message = under_way.sent.message.view(*plan.shape, -1)
        return way.slow.post(message, plan, label, lambda received: end(under_way, received), is_awaited)
    span = mesh.traffic.span(label, pieces[0].device)

    def travel() -> tuple[_UnderWay, torch.Tensor]:
        with span.travels():
            under_way = _encoded(_along_fast_axes(split, way), names, layer_codecs, head_group)
            return under_way, _along_slow_axes(under_way.sent.message, way)

    return mesh.lane.start(str(label), travel, lambda arrived: end(*arrived), span.holds, is_awaited)


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


def _encoded(split: list[torch.Tensor], names: str, layer_codecs: LayerCodecs, head_group: HeadGroup) -> _UnderWay:
    """Encode what goes to other places on the slow axes."""
    values = [piece.flatten(1, 2) for piece in split]  # (S, F * B, n, s, D)
    return _UnderWay(split, messages.encoded(values, names, layer_codecs, head_group, _ends(layer_codecs.way)))


def _ends(way: SlowWay) -> Ends:
    return Ends(way.places, way.here)


def _receive(
    received: torch.Tensor,
    under_way: _UnderWay,
    targets: Sequence[torch.Tensor],
    names: str,
    layer_codecs: LayerCodecs,
    head_group: HeadGroup,
) -> None:
    """Write to the targets what came from other places and what came from this rank's own."""
    way, (split, sent) = layer_codecs.way, under_way
    received, ends = received.reshape(way.places, -1), _ends(way)
    landings = [way.landing(target) for target in targets]
    for (landing, _), piece in zip(landings, split, strict=True):
        kernels.move(landing[way.here], piece[way.here].flatten(0, 1))
    if messages.asks_again(received):
        values = [piece.flatten(1, 2) for piece in split]
        sent = messages.repeated(values, names, layer_codecs, head_group, ends)
        received = way.slow.lane.run(lambda: _along_slow_axes(sent.message, way)).reshape(way.places, -1)
    messages.decode(received, sent, [landing for landing, _ in landings], names, layer_codecs, head_group, ends)
    for (landing, is_target), target, piece in zip(landings, targets, split, strict=True):
        if not is_target:
            kernels.move(target, way.joined(landing.view(piece.shape)))
