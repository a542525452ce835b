"""The exchange by codecs: exact along fast axes, encoded along slow ones, in one of two ways.

In stages, what a rank holds for others goes along the fast axes first, as it is. What then has to cross slow ones is
encoded once, by the rank that puts it there, forwarded as it is through further slow axes, and decoded where it
arrives. So few messages cross slow axes, and all values cross the fast ones.

At once, what a rank holds for other places on slow axes is encoded where it is, and goes to its rank along all axes;
beside it, what stays at the place goes along the fast ones, as it is. So little crosses the fast axes, and nothing
waits for that; but there are as many messages as ranks.

Either way references live at the two ends of a link: one for each place, or one for each rank, that is elsewhere.

Sizes in shapes: S places on slow axes, F on fast ones; n heads, s tokens and D head dim of what one rank holds for
another; B batch. P places of which codecs know, G groups of tokens at each: S and F * B in stages, S * F and B at once.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.message import Message
from xfuser_cocodiff.engine.topology.plans import Plan

T = TypeVar("T")


class _Exchange(NamedTuple):
    """What an exchange is of."""

    targets: Sequence[torch.Tensor]
    mesh: Mesh
    layer_codecs: LayerCodecs
    label: Label
    head_group: HeadGroup
    is_blocking: bool

    @property
    def partition(self) -> AxisPartition:
        """The axes, as the layer's codecs know them."""
        return self.layer_codecs.partition

    def message(self, values: list[torch.Tensor], here: range) -> Message:
        """Make a message of what goes to other places."""
        return Message(self.label.tensors, values, self.layer_codecs, self.head_group, here)

    def receive(
        self,
        message: Message,
        received: torch.Tensor,
        near: Sequence[torch.Tensor],
        here: range,
        carry: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Write to the targets what has come.

        Args:
            message: what was sent.
            received: messages of other places, uint8 (P, bytes).
            near: tensors of this rank's own places, as they are.
            here: these places.
            carry: exchanges messages (P, bytes) once more, where some rank asks for that.
        """
        landings = [self.partition.slot_view(target, len(received)) for target in self.targets]
        for (landing, _), own in zip(landings, near, strict=True):
            landing[here.start : here.stop].copy_(own)
        again = self.mesh.comm_stream.run
        message.decode(received, [landing for landing, _ in landings], lambda sent: again(lambda: carry(sent)))
        for (landing, is_target), target in zip(landings, self.targets, strict=True):
            if not is_target:
                target.copy_(self.partition.join(landing.view(self.partition.num_slow, -1, *target.shape[-4:])))


def start(
    pieces: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    mesh: Mesh,
    layer_codecs: LayerCodecs,
    label: Label,
    head_group: HeadGroup,
    result: T,
    is_blocking: bool = False,
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
        is_blocking: whether the caller waits for it next.
    """
    partition, exchange = layer_codecs.partition, _Exchange(targets, mesh, layer_codecs, label, head_group, is_blocking)
    split = [partition.split(piece) for piece in pieces]
    if partition.fast is None or layer_codecs.single_stage:
        return _single_stage(split, exchange, result)
    return _in_stages(split, exchange, result)


def _single_stage(split: list[torch.Tensor], exchange: _Exchange, result: T) -> Handle[T]:
    """Send (S, F, B, n, s, D) to all ranks, encoded or not."""
    partition, mesh, label = exchange.partition, exchange.mesh, exchange.label
    here = range(partition.slow_index * partition.num_fast, (partition.slow_index + 1) * partition.num_fast)
    message = exchange.message([piece.flatten(0, 1) for piece in split], here)
    far, stays = _to_all(message.encoded(), partition, mesh), [piece[partition.slow_index] for piece in split]

    def carry(sent: torch.Tensor) -> torch.Tensor:
        return _by_place(mesh.all_to_all(*_to_all(sent, partition, mesh)), partition)

    def end(received: torch.Tensor, near: list[torch.Tensor]) -> T:
        exchange.receive(message, _by_place(received, partition), near, here, carry)
        return result

    if partition.fast is None:
        return mesh.start_all_to_all(*far, label, lambda received: end(received, stays), exchange.is_blocking)
    fast, near = partition.fast, _along(_packed(stays), partition.fast)

    def travel() -> tuple[torch.Tensor, list[torch.Tensor]]:
        first, second = mesh.begin_all_to_all(*far), fast.begin_all_to_all(*near)
        return first(), _unpacked(second(), stays)

    # In the lane, even where both have one stage: others may have a stage among the same ranks, and keep their order.
    return mesh.start(label, travel, lambda arrived: end(*arrived), exchange.is_blocking)


def _to_all(message: torch.Tensor, partition: AxisPartition, mesh: Mesh) -> tuple[torch.Tensor, Plan]:
    """Messages (S * F, bytes) as they go to their ranks, and how."""
    plan = mesh.policy.choose(message.nbytes)
    by_rank = partition.join(message.unflatten(0, (partition.num_slow, partition.num_fast)))
    return by_rank.reshape(*plan.shape, -1), plan


def _by_place(received: torch.Tensor, partition: AxisPartition) -> torch.Tensor:
    """The inverse."""
    return partition.split(received.reshape(*partition.shape, -1)).flatten(0, 1)


def _in_stages(split: list[torch.Tensor], exchange: _Exchange, result: T) -> Handle[T]:
    """Send (S, F, B, n, s, D) along the fast axes, and then along the slow ones, encoded."""
    partition, mesh, fast = exchange.partition, exchange.mesh, exchange.partition.fast
    here = range(partition.slow_index, partition.slow_index + 1)

    def carry(sent: torch.Tensor) -> torch.Tensor:
        return partition.slow.all_to_all(*_along(sent, partition.slow)).reshape(partition.num_slow, -1)

    def travel() -> tuple[Message, Sequence[torch.Tensor], torch.Tensor]:
        """The values come along: the lane tells who uses them."""
        turned = [piece.transpose(0, 1) for piece in split]
        found = _unpacked(fast.all_to_all(*_along(_packed(turned), fast)), turned)
        message = exchange.message([piece.transpose(0, 1).flatten(1, 2) for piece in found], here)
        return message, message.values, carry(message.encoded())

    def end(arrived: tuple[Message, Sequence[torch.Tensor], torch.Tensor]) -> T:
        message, values, received = arrived
        exchange.receive(message, received, [each[partition.slow_index, None] for each in values], here, carry)
        return result

    return mesh.start(exchange.label, travel, end, exchange.is_blocking)


def _along(message: torch.Tensor, mesh: Mesh) -> tuple[torch.Tensor, Plan]:
    """A message (ranks, n) as it goes along the axes of a mesh, and how."""
    plan = mesh.policy.choose(message.nbytes)
    return message.view(*plan.shape, -1), plan


def _packed(parts: list[torch.Tensor]) -> torch.Tensor:
    """Tensors (F, ...) in one message (F, n)."""
    sizes = _sizes(parts)
    message = parts[0].new_empty(len(parts[0]), sum(sizes))
    for room, part in zip(message.split_with_sizes(sizes, 1), parts, strict=True):
        room.unflatten(1, part.shape[1:]).copy_(part)
    return message


def _unpacked(message: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """The inverse, of a message whose ranks may be many dims; views."""
    parts = message.reshape(len(like[0]), -1).split_with_sizes(_sizes(like), 1)
    return [part.unflatten(1, each.shape[1:]) for part, each in zip(parts, like, strict=True)]


def _sizes(parts: list[torch.Tensor]) -> list[int]:
    return [math.prod(part.shape[1:]) for part in parts]
