"""The coded all-to-all: values go along the fast axes unchanged, and then encoded along the slow ones.

They are encoded once and decoded only at their destination, also where they cross several slow axes. Link references
are at the two ends of a link: one for each other coordinate on the slow axes.

Sizes in shapes: S coordinates on slow axes, F on fast axes; n heads, s tokens and D head dim of one rank's values for
another; B batch. A message has S slots of F * B groups of tokens.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch

from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.packing import pack, unpack
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.message import Message

T = TypeVar("T")


def start(
    pieces: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    mesh: Mesh,
    layer_codecs: LayerCodecs,
    label: Label,
    result: T,
    is_blocking: bool = False,
) -> Handle[T]:
    """Start a coded all-to-all.

    Args:
        pieces: values by destination, (S, F, B, n, s, D) each, all of one dtype.
        targets: tensors for values by source, of the same shapes; written when the handle is waited for.
        mesh: mesh of all axes.
        layer_codecs: codecs of the layer. Of one head group, V must be sent before or together with Q and K.
        label: letters of the tensors, q, k, v or o, the layer's name, and the head group.
        result: result of the handle.
        is_blocking: whether the caller waits for the handle at once.
    """
    partition = layer_codecs.slow_and_fast
    local_slots = range(partition.slow_index, partition.slow_index + 1)

    def along_slow_axes(sent: torch.Tensor) -> torch.Tensor:
        return _all_to_all(sent, partition.slow).view(partition.num_slow, -1)

    def communicate() -> tuple[Message, Sequence[torch.Tensor], torch.Tensor]:
        """Return the values too, so that the comm stream records their use by the caller's stream."""
        values = _along_fast_axes(pieces, partition.fast) if partition.fast else pieces
        in_slots = [each.detach().flatten(1, 2) for each in values]
        message = Message(label, in_slots, layer_codecs, local_slots)
        return message, in_slots, along_slow_axes(message.encode())

    def receive(arrived: tuple[Message, Sequence[torch.Tensor], torch.Tensor]) -> T:
        message, sent_values, received = arrived
        views = [_slot_view(target) for target in targets]
        for (view, _), values in zip(views, sent_values, strict=True):
            view[partition.slow_index].copy_(values[partition.slow_index])
        run = mesh.comm_stream.run
        message.decode(received, [view for view, _ in views], lambda sent: run(lambda: along_slow_axes(sent)))
        for (view, is_target), target in zip(views, targets, strict=True):
            if not is_target:
                target.copy_(view.view(target.shape))
        return result

    return mesh.start(label, communicate, receive, is_blocking)


def _along_fast_axes(pieces: Sequence[torch.Tensor], fast: Mesh) -> list[torch.Tensor]:
    """Return pieces (S, F, B, n, s, D) as the other ranks on the fast axes send them."""
    by_fast_index = [piece.transpose(0, 1) for piece in pieces]
    received = unpack(_all_to_all(pack(by_fast_index, 1), fast), by_fast_index, 1)
    return [piece.transpose(0, 1) for piece in received]


def _all_to_all(message: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return a message (ranks, n) as other ranks send it."""
    plan = mesh.policy.choose(message.nbytes)
    return mesh.all_to_all(message.view(*plan.shape, -1), plan).reshape(message.shape)


def _slot_view(target: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return a target (S, F, B, n, s, D) by slots, (S, F * B, n, s, D), and whether it is a view of the target.

    Several ranks and samples may have no such view; the result is a new tensor then.
    """
    shape = (target.shape[0], target.shape[1] * target.shape[2], *target.shape[3:])
    try:
        return target.view(shape), True
    except (RuntimeError, ValueError):  # fake tensors raise ValueError
        return target.new_empty(shape), False
